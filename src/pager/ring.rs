//! Which ring slot each streamed page uses: a pure dealing of slots.
//!
//! Slots run in laps of equal length over the pass, so that the distance between two uses of a slot
//! stays near the ring's size, also where passes meet.

#![deny(unsafe_code)]

/// The slot of the `place`-th of `streamed` pages, in a ring of `slots`. Zero slots give slot zero.
pub(crate) fn slot(place: u32, streamed: u32, slots: u32) -> u32 {
    if streamed <= slots || slots == 0 {
        return place;
    }
    let laps = u64::from(streamed.div_ceil(slots));
    let (place, streamed) = (u64::from(place), u64::from(streamed));
    // Lap `j` begins at `j * streamed / laps`, rounded up; the lap of a place is the last that begins at or
    // before it.
    let lap = place * laps / streamed;
    let start = (lap * streamed).div_ceil(laps);
    u32::try_from(place - start).unwrap_or(0)
}

/// The longest lap: slots that are used of a ring of `slots`.
pub(crate) fn lap(streamed: u32, slots: u32) -> u32 {
    if streamed <= slots || slots == 0 {
        streamed.min(slots)
    } else {
        streamed.div_ceil(streamed.div_ceil(slots))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_are_equal_and_stay_inside_the_ring() {
        for slots in 1..20 {
            for streamed in 1..200 {
                let dealt: Vec<u32> = (0..streamed).map(|place| slot(place, streamed, slots)).collect();
                assert!(dealt.iter().all(|&slot| slot < slots.max(1)), "{streamed} in {slots}: {dealt:?}");
                let laps: Vec<usize> = dealt.split(|&slot| slot == 0).skip(1).map(<[u32]>::len).collect();
                let (short, long) = (laps.iter().min().unwrap(), laps.iter().max().unwrap());
                assert!(long - short <= 1, "{streamed} in {slots}: {dealt:?}");
            }
        }
    }

    #[test]
    fn a_part_of_half_the_ring_never_meets_itself() {
        for slots in 2..24_u32 {
            for streamed in slots + 1..150 {
                let part = slots / 2;
                for first in 0..streamed {
                    let mut used: Vec<u32> =
                        (0..part).map(|k| slot((first + k) % streamed, streamed, slots)).collect();
                    used.sort_unstable();
                    used.dedup();
                    // Where passes meet a run wraps from the last lap into the first.
                    assert!(used.len() >= part.min(streamed / streamed.div_ceil(slots)) as usize);
                }
            }
        }
    }
}
