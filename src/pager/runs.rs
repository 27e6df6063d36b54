//! How a run of neighbouring pages is cut into copies: a decision over numbers.
//!
//! Pure. A copy costs the link some time beside that of its bytes, so that one of a single page is dear. Ring
//! frames come free by what each release frees, which may be a page at a time: prefetch then waits until there
//! are enough for a copy that is worth it, or for the rest of the run.

#![deny(unsafe_code)]

/// How many pages of a run of `pages` are read and copied first, at most `most` at a time: parts of about one length,
/// so that no small one is left over.
pub(crate) fn part_of(pages: u32, most: u32) -> u32 {
    pages.div_ceil(pages.div_ceil(most.max(1)).max(1))
}

/// Ring frames from which on copies ahead are of several pages.
const SEVERAL: u32 = 5;

/// How many pages at a time are copied ahead through a ring of `slots`, if copies are of at most `most`: no more than
/// half of it, and one through a ring of few. Prefetch that waited for more would leave the link idle until the runner
/// is through with all that the ring holds.
pub(crate) fn most_ahead(most: u32, slots: u32) -> u32 {
    if slots < SEVERAL { 1 } else { most.min(slots / 2).max(1) }
}

/// How many pages of a run of `pages` are copied ahead now, at most `most` at a time, if the first `free` of
/// them have frames: none where that would make a copy of one page, now or later.
pub(crate) fn ahead_of(pages: u32, free: u32, most: u32) -> u32 {
    let part = part_of(pages, most);
    if free >= part {
        return part;
    }
    let some = if free + 1 == pages { free.saturating_sub(1) } else { free };
    if some >= 2 { some } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_into_as_few_parts_as_can_be_of_about_one_length() {
        for most in 1..9 {
            for pages in 1..60 {
                let (mut left, mut parts) = (pages, Vec::new());
                while left > 0 {
                    parts.push(part_of(left, most));
                    left -= part_of(left, most);
                }
                assert_eq!(parts.len(), pages.div_ceil(most) as usize, "{pages} by {most}: {parts:?}");
                let (Some(short), Some(long)) = (parts.iter().min(), parts.iter().max()) else { panic!() };
                assert!(long - short <= 1 && *long <= most, "{pages} by {most}: {parts:?}");
            }
        }
    }

    #[test]
    fn half_of_the_ring_can_be_under_way_while_the_runner_is_at_the_other() {
        for most in 0..9 {
            for slots in 0..30 {
                let ahead = most_ahead(most, slots);
                assert!(ahead >= 1 && ahead <= most.max(1), "{most} through {slots}: {ahead}");
                assert!(2 * ahead <= slots.max(2), "{most} through {slots}: {ahead}");
            }
        }
        assert_eq!([3, 4, 5, 8, 100].map(|slots| most_ahead(4, slots)), [1, 1, 2, 4, 4]);
    }

    #[test]
    fn no_copy_ahead_is_of_one_page_unless_the_run_is_or_copies_are() {
        for most in 1..9 {
            for pages in 1..30 {
                for free in 0..=pages {
                    let now = ahead_of(pages, free, most);
                    assert!(now <= free && now <= most, "{pages}, {free} free, by {most}: {now}");
                    let alone = now == 1 || now > 0 && pages - now == 1;
                    assert!(!alone || pages == 1 || most <= 2, "{pages}, {free} free, by {most}: {now}");
                }
                assert!(ahead_of(pages, pages, most) > 0);
                assert!(ahead_of(pages, most.min(pages), most) > 0, "it never waits for more than a copy");
            }
        }
    }
}
