//! Is the pager ahead of comfy-aimdo 0.6.0, on the same work over the same driver?
//!
//! Both sides speak to the driver stand-in, whose memory has no bytes here, so that cards of any size can be
//! had. Each row and side runs in a process of its own, since the peer hooks the driver that it finds; timed
//! rows take turns, and the best of the rounds counts.
//!
//! `benches/peer/run.sh [--json] [--check] [WORDS]` fetches the peer, builds, and runs this.

#[path = "../common/mod.rs"]
mod common;

mod api;
mod ours;
mod peer;
mod work;

use std::process::Command;

use common::Outcome;
use common::table::{Args, Report, Row};
use serde::Serialize;
use work::{Kind, WORK, Work};

#[derive(Serialize)]
struct Compared {
    work: &'static str,
    unit: &'static str,
    peer: f64,
    ours: f64,
    ratio: f64,
    limit: f64,
}

impl Row for Compared {
    const COLUMNS: &'static [(&'static str, usize)] =
        &[("work", 58), ("unit", 8), ("peer", 9), ("ours", 9), ("ours/peer", 9), ("limit", 6)];

    fn cells(&self) -> Vec<String> {
        vec![
            self.work.to_owned(),
            self.unit.to_owned(),
            format!("{:.3}", self.peer),
            format!("{:.3}", self.ours),
            if self.ratio.is_finite() { format!("{:.3}", self.ratio) } else { "-".to_owned() },
            if self.limit.is_finite() { format!("{:.3}", self.limit) } else { "-".to_owned() },
        ]
    }

    fn holds(&self) -> bool {
        self.ours <= self.limit * self.peer
    }
}

fn main() -> Outcome {
    let args = Args::read();
    if let Some(row) = args.value("--row") {
        let work = WORK.iter().find(|work| work.name == row).ok_or("there is no such row")?;
        let value = if args.has("--ours") { ours::run(work)? } else { peer::run(work)? };
        println!("{value}");
        return Ok(());
    }
    let mut report = Report::new(args);
    for work in WORK {
        if !report.args().wants(work.name) {
            continue;
        }
        let rounds = if work.is_timed() { 3 } else { 1 };
        let (mut peer, mut ours) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..rounds {
            peer = peer.min(side(work, "--peer")?);
            ours = ours.min(side(work, "--ours")?);
        }
        let unit = match work.kind {
            Kind::Hit { .. } => "ns",
            Kind::Miss { .. } => "us",
            Kind::Stops => "calls",
            _ => "GiB",
        };
        report.add(Compared { work: work.name, unit, peer, ours, ratio: ours / peer, limit: work.limit });
    }
    report.end()
}

/// One side of a row, in a process of its own.
fn side(work: &Work, side: &str) -> Outcome<f64> {
    let output = Command::new(std::env::current_exe()?)
        .arg(format!("--row={}", work.name))
        .arg(side)
        .env("VRAM_PAGER_STANDIN_BYTES", work.card.to_string())
        .env("VRAM_PAGER_STANDIN_BACKING", "none")
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.lines().last().and_then(|line| line.trim().parse().ok());
    value.filter(|_| output.status.success()).ok_or_else(|| {
        format!("{} {side}: {}\n{}", work.name, output.status, String::from_utf8_lossy(&output.stderr)).into()
    })
}
