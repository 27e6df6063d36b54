//! What a run found: the object of `--json`, and the table for people.

use serde::Serialize;
use vram_pager::units::{Rate, format_rate, format_size};

use super::RunOptions;
use crate::Outcome;
use crate::output::{self, Align, Table};

/// What `--json` prints.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) device: DeviceReport,
    pub(crate) weights_bytes: u64,
    pub(crate) units: usize,
    pub(crate) passes: Vec<Pass>,
    pub(crate) resident_bytes: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) headroom_bytes: u64,
    pub(crate) largest_streamed_part_bytes: u64,
    pub(crate) peak_device_bytes: u64,
    pub(crate) device_syncs: u64,
    pub(crate) map_calls: u64,
    pub(crate) verified_units: u64,
    /// `kernel` or `host`; null without --verify.
    pub(crate) verified_by: Option<&'static str>,
    pub(crate) mismatches: u64,
}

#[derive(Serialize)]
pub(crate) struct DeviceReport {
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    pub(crate) total_bytes: u64,
    /// Null where the device does not tell it and it was not measured.
    pub(crate) link_bytes_per_second: Option<u64>,
    pub(crate) link_measured: bool,
}

#[derive(Serialize, Clone, Debug)]
pub(crate) struct Pass {
    #[serde(rename = "pass")]
    pub(crate) number: u32,
    pub(crate) h2d_bytes: u64,
    pub(crate) file_bytes: u64,
    pub(crate) hits: u64,
    pub(crate) loaded: u64,
    pub(crate) streamed: u64,
    pub(crate) modelled_ms: f64,
    pub(crate) wall_ms: f64,
}

/// Prints the table and what is on the card.
pub(super) fn print_report(report: &Report, options: &RunOptions) -> Outcome {
    let mut table = Table::new(&[
        ("pass", Align::Right),
        ("copied", Align::Right),
        ("from file", Align::Right),
        ("hits", Align::Right),
        ("loaded", Align::Right),
        ("streamed", Align::Right),
        ("modelled ms", Align::Right),
        ("wall ms", Align::Right),
    ]);
    for pass in &report.passes {
        table.row([
            pass.number.to_string(),
            format_size(pass.h2d_bytes),
            format_size(pass.file_bytes),
            pass.hits.to_string(),
            pass.loaded.to_string(),
            pass.streamed.to_string(),
            format!("{:.1}", pass.modelled_ms),
            format!("{:.1}", pass.wall_ms),
        ]);
    }
    output::print(|out| {
        writeln!(
            out,
            "{}: {} in {} on {}",
            output::printable(&report.model),
            format_size(report.weights_bytes),
            output::count(report.units, "unit"),
            report.device.name
        )?;
        table.write(out)?;
        writeln!(
            out,
            "on the card: {} resident, {} ring, {} left free; at most {} of {} were used",
            format_size(report.resident_bytes),
            format_size(report.ring_bytes),
            format_size(report.headroom_bytes),
            format_size(report.peak_device_bytes),
            format_size(report.device.total_bytes)
        )?;
        if let (Some(link), true) = (report.device.link_bytes_per_second, report.device.link_measured) {
            writeln!(out, "the link:    {} by the card's own clock", format_rate(Rate(link)))?;
        }
        if options.verify {
            writeln!(
                out,
                "checked{}: {} times a unit's bytes on the card against the file, {} wrong",
                if report.verified_by == Some("host") { " on the host" } else { "" },
                report.verified_units,
                report.mismatches
            )?;
        }
        Ok(())
    })
}
