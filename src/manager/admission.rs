//! The decisions of admission and eviction, as pure functions.
//!
//! Everything here is arithmetic over a snapshot: the executors ([`load`](super::load) and
//! [`free`](super::free)) read the figures, ask here and act. Sums are made in 128 bits, so that no size a
//! caller can name overflows. Owns nothing.

#![deny(unsafe_code)]

use crate::patcher::LoadBudget;

use super::VramState;

/// A request for more than any card has: everything that may be unloaded is.
pub const UNLIMITED: u64 = u64::MAX;

/// What a load must leave free beside the weights: the working memory and the reserve, and no less than
/// the floor (which counts the reserve too).
pub(super) fn working_memory(memory_required: u64, reserve: u64, minimum_inference: u64) -> u64 {
    memory_required.saturating_add(reserve).max(minimum_inference)
}

/// The least free memory that the caller of a load can live with. Without a word from it that is the
/// whole of what it asked for.
pub(super) fn smallest_run(given: Option<u64>, extra_mem: u64, reserve: u64, minimum_inference: u64) -> u64 {
    given.map_or(extra_mem, |given| working_memory(given, reserve, minimum_inference))
}

/// What to ask `free_memory` for: the missing weights, a tenth more, and the working memory. `None` if
/// that exceeds 64 bits.
pub(super) fn admission_ask(missing: u64, extra_mem: u64) -> Option<u64> {
    missing.checked_add(missing.div_ceil(10))?.checked_add(extra_mem)
}

/// What one model may load, from what is free now.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct BudgetInputs {
    /// How much stays on cards.
    pub(super) state: VramState,
    /// Whether the model goes to host memory.
    pub(super) on_cpu: bool,
    /// Whether the caller wants every layer resident.
    pub(super) force_full_load: bool,
    /// Free bytes of the card, signed.
    pub(super) free: i64,
    /// Bytes of this model that are on the card already.
    pub(super) loaded: u64,
    /// The least free memory that the caller can live with.
    pub(super) minimum_memory_required: u64,
    /// The floor and the reserve.
    pub(super) minimum_inference: u64,
    /// The part of free memory that weights may always have.
    pub(super) min_weight_ratio: f64,
}

/// The load budget of one model.
///
/// On NORMAL and LOW, with `free` counting what the model holds already:
/// `max(0, free − minimum_memory_required, min(free × ratio, free − minimum_inference)) − loaded`, where
/// exactly zero means nothing. DISABLED, SHARED, HIGH and host memory load everything, and so does
/// `force_full_load` on NORMAL and LOW. NO always gives nothing, `force_full_load` or not: the reference's
/// page says otherwise, the system that it describes does this.
pub(super) fn load_budget(inputs: &BudgetInputs) -> LoadBudget {
    if inputs.on_cpu {
        return LoadBudget::Everything;
    }
    match inputs.state {
        VramState::No => LoadBudget::Nothing,
        VramState::Disabled | VramState::Shared | VramState::High => LoadBudget::Everything,
        VramState::Normal | VramState::Low if inputs.force_full_load => LoadBudget::Everything,
        VramState::Normal | VramState::Low => {
            let loaded = i128::from(inputs.loaded);
            let free = i128::from(inputs.free) + loaded;
            let above_request = free - i128::from(inputs.minimum_memory_required);
            let above_floor = free - i128::from(inputs.minimum_inference);
            let share = share_of(free, inputs.min_weight_ratio).min(above_floor);
            LoadBudget::of_bytes(saturate(above_request.max(share).max(0) - loaded))
        }
    }
}

/// `free × ratio`, rounded down. A ratio that is no number counts as 0.
fn share_of(free: i128, ratio: f64) -> i128 {
    if ratio.is_nan() {
        return 0;
    }
    #[expect(clippy::cast_precision_loss, reason = "bytes of a card are far below 2^53")]
    let share = (free as f64 * ratio).floor();
    #[expect(clippy::cast_possible_truncation, reason = "a float saturates when it is cast")]
    let share = share as i128;
    share
}

fn saturate(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

/// A candidate for eviction, as it stood when the request came.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Candidate {
    /// Bytes of it that are off the card. More goes first.
    pub(super) offloaded: std::cmp::Reverse<u64>,
    /// Strong references that others hold to its patcher. Fewer goes first.
    pub(super) references: usize,
    /// Its size. Smaller goes first.
    pub(super) size: u64,
    /// Its place in the ledger, the newest being 0. Newer goes first.
    pub(super) index: usize,
}

/// Sorts candidates, each with whatever goes along with it, into the order in which they are asked.
pub(super) fn sort_victims<T>(candidates: &mut [(Candidate, T)]) {
    candidates.sort_unstable_by_key(|(candidate, _)| *candidate);
}

/// A request for memory, as it shrinks from victim to victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    required: i128,
    unlimited: bool,
    for_dynamic: bool,
    smart_memory: bool,
}

/// What to do with one victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// Leave it alone: enough is free, or its pages come on demand.
    Spare,
    /// Ask it for this many bytes.
    Unload(u64),
    /// Read the free figure and ask again: the answer depends on it.
    NeedsFigure,
}

impl Request {
    /// A request for `bytes` on one card.
    pub(super) fn new(bytes: u64, for_dynamic: bool, smart_memory: bool) -> Self {
        Self { required: i128::from(bytes), unlimited: bytes == UNLIMITED, for_dynamic, smart_memory }
    }

    /// What to do with the next victim. `free` is the card's figure where it was read; without it the
    /// answer may be [`Verdict::NeedsFigure`].
    ///
    /// - Without smart memory every victim is asked for everything, paged ones too.
    /// - A paged victim of a request for paged models is left alone and its bytes count as free.
    /// - A request of [`UNLIMITED`] asks for everything whatever is free.
    pub(super) fn verdict(&mut self, victim_dynamic: bool, victim_loaded: u64, free: Option<i64>) -> Verdict {
        if !self.smart_memory {
            return Verdict::Unload(UNLIMITED);
        }
        if victim_dynamic && self.for_dynamic {
            self.required -= i128::from(victim_loaded);
            return Verdict::Spare;
        }
        if self.unlimited {
            return Verdict::Unload(UNLIMITED);
        }
        let Some(free) = free else { return Verdict::NeedsFigure };
        match u64::try_from(self.required - i128::from(free)) {
            Ok(0) | Err(_) => Verdict::Spare,
            Ok(shortfall) => Verdict::Unload(shortfall),
        }
    }
}

/// Whether to hand idle cache back after a request: always if something was unloaded, otherwise if it is
/// more than a quarter of what counts as free and the state is not HIGH.
pub(super) fn should_empty_cache(unloaded_any: bool, state: VramState, free: i64, cache: u64) -> bool {
    unloaded_any || (state != VramState::High && i128::from(cache) * 4 > i128::from(free))
}

/// What is left for weights on a card of `total` bytes: 88 % of it less the floor and the reserve.
pub(super) fn maximum_vram_for_weights(total: u64, minimum_inference: u64) -> u64 {
    let share = u128::from(total) * 88 / 100;
    u64::try_from(share).unwrap_or(u64::MAX).saturating_sub(minimum_inference)
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use super::*;
    use crate::units::{GIB, MIB};

    const FLOOR: u64 = 858_993_460 + 400 * MIB;

    fn inputs(state: VramState, free_mib: i64, loaded_mib: u64) -> BudgetInputs {
        BudgetInputs {
            state,
            on_cpu: false,
            force_full_load: false,
            free: free_mib * 1024 * 1024,
            loaded: loaded_mib * MIB,
            minimum_memory_required: FLOOR,
            minimum_inference: FLOOR,
            min_weight_ratio: 0.0,
        }
    }

    #[test]
    fn working_memory_never_falls_below_the_floor() {
        assert_eq!(working_memory(0, 400 * MIB, FLOOR), FLOOR);
        assert_eq!(working_memory(2 * GIB, 400 * MIB, FLOOR), 2 * GIB + 400 * MIB);
        assert_eq!(working_memory(u64::MAX, 1, FLOOR), u64::MAX);
    }

    #[test]
    fn the_smallest_run_is_the_whole_request_unless_the_caller_named_one() {
        assert_eq!(smallest_run(None, 7 * GIB, 400 * MIB, FLOOR), 7 * GIB);
        assert_eq!(smallest_run(Some(GIB), 7 * GIB, 400 * MIB, FLOOR), GIB + 400 * MIB);
        assert_eq!(smallest_run(Some(0), 7 * GIB, 400 * MIB, FLOOR), FLOOR);
    }

    #[test]
    fn the_ask_is_the_sum_and_a_tenth_rounded_up_and_overflows_to_none() {
        assert_eq!(admission_ask(0, 5), Some(5));
        assert_eq!(admission_ask(1, 0), Some(2));
        assert_eq!(admission_ask(100, 7), Some(117));
        assert_eq!(admission_ask(u64::MAX, 0), None);
        assert_eq!(admission_ask(u64::MAX / 2, u64::MAX / 2), None);
    }

    #[test]
    fn states_give_their_budgets() {
        use LoadBudget::{Everything, Nothing};
        let forced = |state| load_budget(&BudgetInputs { force_full_load: true, ..inputs(state, 100, 0) });
        let plain = |state| load_budget(&inputs(state, 100, 0));
        for (state, plain_budget, forced_budget) in [
            (VramState::Disabled, Everything, Everything),
            (VramState::Shared, Everything, Everything),
            (VramState::High, Everything, Everything),
            (VramState::No, Nothing, Nothing),
            (VramState::Low, Nothing, Everything),
            (VramState::Normal, Nothing, Everything),
        ] {
            assert_eq!(plain(state), plain_budget, "{state:?}");
            assert_eq!(forced(state), forced_budget, "{state:?}");
        }
        let on_cpu = BudgetInputs { on_cpu: true, ..inputs(VramState::No, 0, 0) };
        assert_eq!(load_budget(&on_cpu), Everything);
    }

    #[test]
    fn the_budget_is_what_is_free_above_the_request_or_the_ratio_allows() {
        let floor = i64::try_from(FLOOR).unwrap();
        let bytes = |mib: i64| mib * 1024 * 1024;
        let table = [
            // Plenty: what is above the floor.
            (inputs(VramState::Normal, 8192, 0), LoadBudget::Bytes(bytes(8192) - floor)),
            // What is loaded counts as free, and as loaded.
            (inputs(VramState::Normal, 4096, 4096), LoadBudget::Bytes(bytes(8192) - floor - bytes(4096))),
            // Below the floor everything loaded must go.
            (inputs(VramState::Normal, 0, 64), LoadBudget::Bytes(-bytes(64))),
            // Nothing loaded, nothing to have.
            (inputs(VramState::Low, 100, 0), LoadBudget::Nothing),
            // Overdrawn.
            (inputs(VramState::Low, -100, 0), LoadBudget::Nothing),
        ];
        for (inputs, budget) in table {
            assert_eq!(load_budget(&inputs), budget, "{inputs:?}");
        }
        // A large request leaves the ratio's share, as long as the floor stays free.
        let big = BudgetInputs {
            minimum_memory_required: 8 * GIB,
            min_weight_ratio: 0.4,
            ..inputs(VramState::Normal, 8000, 0)
        };
        assert_eq!(load_budget(&big), LoadBudget::Bytes(bytes(3200)));
        let tight = BudgetInputs { free: bytes(1500), ..big };
        assert_eq!(load_budget(&tight), LoadBudget::Bytes(bytes(1500) - floor));
    }

    #[test]
    fn absurd_budgets_saturate_and_do_not_panic() {
        for ratio in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, 2.0] {
            for free in [i64::MIN, -1, 0, 1, i64::MAX] {
                for loaded in [0, 1, u64::MAX] {
                    load_budget(&BudgetInputs {
                        free,
                        loaded,
                        min_weight_ratio: ratio,
                        ..inputs(VramState::Normal, 0, 0)
                    });
                }
            }
        }
    }

    #[test]
    fn victims_are_most_offloaded_then_least_referenced_then_smallest_then_newest() {
        let candidate = |offloaded, references, size, index| {
            (Candidate { offloaded: Reverse(offloaded), references, size, index }, ())
        };
        let mut list = vec![
            candidate(0, 1, 10, 0),
            candidate(0, 1, 10, 5),
            candidate(0, 3, 1, 1),
            candidate(0, 1, 9, 9),
            candidate(50, 9, 99, 7),
        ];
        sort_victims(&mut list);
        assert_eq!(list.iter().map(|(victim, ())| victim.index).collect::<Vec<_>>(), [7, 9, 0, 5, 1]);
    }

    #[test]
    fn a_request_is_met_when_the_shortfall_is_gone() {
        let mut request = Request::new(100, false, true);
        assert_eq!(request.verdict(false, 50, None), Verdict::NeedsFigure);
        assert_eq!(request.verdict(false, 50, Some(40)), Verdict::Unload(60));
        assert_eq!(request.verdict(true, 50, Some(40)), Verdict::Unload(60));
        assert_eq!(request.verdict(false, 50, Some(100)), Verdict::Spare);
        assert_eq!(request.verdict(false, 50, Some(-10)), Verdict::Unload(110));
    }

    #[test]
    fn paged_victims_of_a_paged_request_are_spared_and_counted() {
        let mut request = Request::new(100, true, true);
        assert_eq!(request.verdict(true, 70, None), Verdict::Spare);
        assert_eq!(request.verdict(false, 50, Some(10)), Verdict::Unload(20));
        assert_eq!(request.verdict(true, 70, None), Verdict::Spare);
        assert_eq!(request.verdict(false, 50, Some(10)), Verdict::Spare);
    }

    #[test]
    fn without_smart_memory_everyone_is_asked_for_everything() {
        let mut request = Request::new(0, true, false);
        assert_eq!(request.verdict(true, 70, None), Verdict::Unload(UNLIMITED));
        assert_eq!(request.verdict(false, 70, Some(i64::MAX)), Verdict::Unload(UNLIMITED));
    }

    #[test]
    fn an_unlimited_request_needs_no_figure() {
        assert_eq!(Request::new(UNLIMITED, false, true).verdict(false, 1, None), Verdict::Unload(UNLIMITED));
    }

    #[test]
    fn idle_cache_goes_back_above_a_quarter_of_free() {
        let normal = VramState::Normal;
        assert!(should_empty_cache(true, VramState::High, 100, 0));
        assert!(!should_empty_cache(false, normal, 100, 25));
        assert!(should_empty_cache(false, normal, 100, 26));
        assert!(!should_empty_cache(false, VramState::High, 100, 99));
        assert!(should_empty_cache(false, normal, -4, 0), "overdrawn books hand back whatever there is");
    }

    #[test]
    fn weights_may_have_88_percent_less_the_floor() {
        assert_eq!(maximum_vram_for_weights(100 * GIB, 0), 88 * GIB);
        assert_eq!(maximum_vram_for_weights(GIB, 2 * GIB), 0);
        assert!(maximum_vram_for_weights(u64::MAX, 0) > 0);
    }
}
