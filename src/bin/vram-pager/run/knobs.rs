//! The manager's settings of a run, and the arguments that are sizes and durations.
//!
//! Pure but for [`set_knobs`], which hands the settings to a manager.

use std::time::Duration;

use vram_pager::manager::{Knobs, Manager};
use vram_pager::units::{GIB, parse_size};

use super::{CardOptions, RunOptions};
use crate::output::Failure;

/// The card size from which the manager's floor, reserve and headroom have their full values.
const FULL_SIZE_CARD: u64 = 4 * GIB;

/// The longest compute of a GiB that is taken: an hour.
const LONGEST: f64 = 3600.0;

/// A size, for clap.
pub(crate) fn parse_size_argument(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// A duration such as `30ms`, `1.5s`, `250us` or `0s`, for clap.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let refuse = |why: &str| Err(format!("{why}; write for example 30ms, 1.5s or 250us"));
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let Ok(number) = number.parse::<f64>() else { return refuse("it does not begin with a number") };
    let second = match unit.trim() {
        "s" => 1.0,
        "ms" => 1e3,
        "us" | "µs" => 1e6,
        "ns" => 1e9,
        "" => return refuse("its unit is missing"),
        unit => return refuse(&format!("there is no unit `{unit}`")),
    };
    let seconds = number / second;
    if seconds > LONGEST {
        return refuse("it is longer than an hour");
    }
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// The settings for a card of `total` bytes; on a small card the fixed sums shrink with it.
fn knobs_for(total: u64, card: &CardOptions) -> Result<Knobs, Failure> {
    let shrunk = |bytes: u64| {
        let scaled = u128::from(bytes) * u128::from(total.min(FULL_SIZE_CARD)) / u128::from(FULL_SIZE_CARD);
        u64::try_from(scaled).unwrap_or(bytes)
    };
    let reserve = match card.reserve_vram {
        None => None,
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be a size that a card can have"
        )]
        Some(gib) if gib.is_finite() && (0.0..1e6).contains(&gib) => Some((gib * GIB as f64) as u64),
        Some(gib) => return Err(Failure::BadInput(format!("--reserve-vram {gib} is no size in GiB"))),
    };
    let usual = Knobs::default();
    Ok(Knobs {
        reserve: reserve.unwrap_or_else(|| shrunk(usual.reserve)),
        inference_floor: shrunk(usual.inference_floor),
        headroom: card.headroom,
        page_locked_budget: card.page_locked,
        ..usual
    })
}

/// What a run leaves free on a card of `total` bytes.
pub(crate) fn headroom_for(total: u64, card: &CardOptions) -> Result<u64, Failure> {
    Ok(knobs_for(total, card)?.headroom_of(total))
}

/// Gives the settings of a run to its manager.
pub(super) fn set_knobs(manager: &Manager, total: u64, options: &RunOptions) -> Result<(), Failure> {
    let wanted = knobs_for(total, &options.card)?;
    manager.set_knobs(|knobs| {
        *knobs = wanted;
        knobs.vram_state = options.vram_state.into();
        knobs.smart_memory = !options.disable_smart_memory;
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit_and_an_end() {
        assert_eq!(parse_duration("30ms"), Ok(Duration::from_millis(30)));
        assert_eq!(parse_duration(" 1.5 s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("0s"), Ok(Duration::ZERO));
        for bad in ["30", "ms", "-3ms", "1e9s", "4000s", "3 min", "1.2.3s", "NaNs", ""] {
            let error = parse_duration(bad).unwrap_err();
            assert!(error.contains("30ms"), "{bad}: {error}");
        }
    }

    #[test]
    fn the_headroom_of_a_small_card_shrinks_with_it_unless_it_is_given() {
        let mut card = CardOptions::new("emulated:4GiB".to_owned());
        assert_eq!(headroom_for(8 * GIB, &card).unwrap(), 8 * GIB / 32);
        assert_eq!(headroom_for(GIB, &card).unwrap(), GIB / 32);
        assert_eq!(headroom_for(80 * GIB, &card).unwrap(), 400 << 20);
        card.headroom = Some(7);
        assert_eq!(headroom_for(GIB, &card).unwrap(), 7);
        card.reserve_vram = Some(f64::NAN);
        assert!(headroom_for(GIB, &card).is_err());
    }
}
