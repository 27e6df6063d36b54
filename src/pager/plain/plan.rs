//! Which spans stay and how large the ring's slots are, where a span is whole or not there: a decision over
//! numbers. Pure.

#![deny(unsafe_code)]

/// What a model gets of a card without virtual memory calls.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct WholePlan {
    /// Whether a span has a block of its own, by span.
    pub(crate) resident: Vec<bool>,
    /// Bytes of those.
    pub(crate) resident_bytes: u64,
    /// Blocks that the other spans pass through.
    pub(crate) slots: u32,
    /// The size of each: the largest span that passes through.
    pub(crate) slot_bytes: u64,
}

/// Sizes of a slot that are tried. Spans larger than a slot stay.
const TRIED: usize = 8;

/// Plans `budget` bytes for spans of `sizes` bytes; those that `in_pass` denies get nothing.
///
/// Two slots, so that one is filled while the other is read; one where two would not fit. Of the sizes
/// tried the one that leaves the fewest bytes to stream wins. The spans that stay are spread over the pass.
/// A span larger than the budget is left out: its fault is refused.
pub(crate) fn plan(sizes: &[u64], in_pass: impl Fn(u32) -> bool, budget: u64) -> WholePlan {
    let spans: Vec<(usize, u64)> = (0_u32..)
        .zip(sizes)
        .filter(|&(span, &bytes)| in_pass(span) && bytes <= budget)
        .map(|(span, &bytes)| (span as usize, bytes))
        .collect();
    let mut all = WholePlan { resident: vec![false; sizes.len()], ..WholePlan::default() };
    let total: u64 = spans.iter().map(|(_, bytes)| bytes).sum();
    if total <= budget {
        for (span, _) in &spans {
            all.resident[*span] = true;
        }
        all.resident_bytes = total;
        return all;
    }
    let mut tried: Vec<u64> = spans.iter().map(|(_, bytes)| *bytes).collect();
    tried.sort_unstable_by(|a, b| b.cmp(a));
    tried.dedup();
    tried.truncate(TRIED);
    for slots in [2, 1] {
        let fitted = tried.iter().filter_map(|slot| fit(&spans, sizes.len(), budget, slots, *slot));
        if let Some(best) = fitted.max_by_key(|plan| plan.resident_bytes) {
            return best;
        }
    }
    all
}

/// The plan with `slots` slots of `slot_bytes`, if there is room for them and for what must stay.
fn fit(spans: &[(usize, u64)], count: usize, budget: u64, slots: u32, slot_bytes: u64) -> Option<WholePlan> {
    let mut room = budget.checked_sub(u64::from(slots) * slot_bytes)?;
    let mut resident = vec![false; count];
    for (span, bytes) in spans.iter().filter(|(_, bytes)| *bytes > slot_bytes) {
        room = room.checked_sub(*bytes)?;
        resident[*span] = true;
    }
    for place in spread(spans.len()) {
        let (span, bytes) = spans[place];
        if !resident[span] && bytes <= room {
            room -= bytes;
            resident[span] = true;
        }
    }
    let resident_bytes = budget - u64::from(slots) * slot_bytes - room;
    Some(WholePlan { resident, resident_bytes, slots, slot_bytes })
}

/// The places `0..count` in an order whose every beginning lies evenly over them: bits reversed.
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let bits = usize::BITS - count.leading_zeros();
    (0..1_usize << bits)
        .map(move |place| if bits == 0 { place } else { place.reverse_bits() >> (usize::BITS - bits) })
        .filter(move |place| *place < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_stays_whole() {
        let plan = plan(&[3, 4, 5], |_| true, 12);
        assert_eq!(plan.resident, [true; 3]);
        assert_eq!((plan.slots, plan.resident_bytes), (0, 12));
    }

    #[test]
    fn resident_spans_and_slots_never_exceed_the_budget_and_every_span_has_a_way() {
        let mut seed = 0x51AB_u64;
        println!("seed {seed:#x}");
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for _ in 0..2000 {
            let sizes: Vec<u64> = (0..=random(30)).map(|_| 1 + random(100)).collect();
            let budget = 1 + random(600);
            let plan = plan(&sizes, |_| true, budget);
            let kept: u64 = sizes.iter().zip(&plan.resident).filter(|(_, kept)| **kept).map(|(b, _)| b).sum();
            assert_eq!(kept, plan.resident_bytes);
            assert!(
                kept + u64::from(plan.slots) * plan.slot_bytes <= budget,
                "{sizes:?} in {budget}: {plan:?}"
            );
            for (bytes, kept) in sizes.iter().zip(&plan.resident) {
                let streams = plan.slots > 0 && *bytes <= plan.slot_bytes;
                assert!(*kept || streams || *bytes > budget, "{sizes:?} in {budget}: {plan:?}");
            }
        }
    }

    #[test]
    fn a_few_large_spans_stay_rather_than_force_large_slots() {
        let mut sizes = vec![10; 20];
        sizes[3] = 100;
        let plan = plan(&sizes, |_| true, 160);
        assert!(plan.resident[3]);
        assert_eq!((plan.slots, plan.slot_bytes), (2, 10));
        assert_eq!(plan.resident_bytes, 140);
    }

    #[test]
    fn spans_outside_the_pass_get_nothing() {
        let plan = plan(&[50, 10, 10], |span| span != 0, 20);
        assert_eq!(plan.resident, [false, true, true]);
        assert_eq!(plan.slots, 0);
    }
}
