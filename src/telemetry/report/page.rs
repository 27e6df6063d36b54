//! Tables, words and the HTML around the pictures.

#![deny(unsafe_code)]

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use plotters::prelude::RGBColor;

use super::super::account::{Account, SlowUnit, accounts, is_steady, slowest_units};
use super::super::recording::{Recording, TimeSource, TimeSpan, harmless};
use super::canvas::{COMPUTE, LINK, STALL};
use super::lanes::{self, Lane, Marker};
use super::map;
use crate::units::format_size;

/// Units in the table of slow ones.
const SLOW_UNITS: usize = 10;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;color:#2b323c;background:#fff;max-width:1000px;margin:32px auto;\
padding:0 20px}\
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:34px 0 4px}p{margin:4px 0 10px}\
.say{font-size:16px}.how,figcaption{color:#6b7582;font-size:14px}\
figure{margin:8px 0 0}svg{max-width:100%;height:auto;display:block}\
svg rect{shape-rendering:crispEdges}\
table{border-collapse:collapse;margin:8px 0;font-size:14px}\
td,th{padding:3px 14px 3px 0;text-align:left;vertical-align:top}\
th{color:#6b7582;font-weight:normal}tr+tr td{border-top:1px solid #eef0f3}\
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
.u{overflow-wrap:anywhere}\
.key{display:inline-block;margin:0 16px 2px 0;white-space:nowrap}\
.key i{display:inline-block;width:12px;height:12px;margin-right:6px;border-radius:2px;vertical-align:-1px}";

/// Writes the whole page.
pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let accounts = accounts(recording);
    let slow = slowest_units(recording, SLOW_UNITS);
    let model = short_name(&recording.model);
    writeln!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>{model} on {device}</title><style>{STYLE}</style></head><body>\n\
         <h1>{model} on {device}</h1>",
        model = escaped(&model),
        device = escaped(&recording.device),
    )?;
    writeln!(out, "<p class=\"how\">{}</p>", clock_words(recording))?;
    if let Some(last) = accounts.last() {
        writeln!(out, "<p class=\"say\">{}</p>", verdict(recording, last))?;
    }
    if recording.dropped > 0 {
        writeln!(
            out,
            "<p>The run was longer than what is kept: {} steps and operations, the latest ones, are not \
             shown.</p>",
            recording.dropped
        )?;
    }
    figures(recording, &accounts, out)?;
    timelines(recording, &accounts, &slow, out)?;
    residency(recording, out)?;
    slow_units(recording, &slow, out)?;
    writeln!(out, "</body></html>")
}

/// The last part of a path.
fn short_name(model: &str) -> String {
    harmless(model.rsplit('/').next().unwrap_or(model))
}

fn clock_words(recording: &Recording) -> &'static str {
    match recording.source {
        TimeSource::Modelled => {
            "All times are of the emulated card's modelled clock: what was asked of the card, at the rates \
             that it was given. They are the same on every machine."
        }
        TimeSource::Wall => {
            "All times are of the host's clock. What the card's link and compute units did is not seen from \
             here; a stall is a fault that made the runner's thread wait."
        }
    }
}

/// What held the last pass up, in a sentence.
fn verdict(recording: &Recording, last: &Account) -> String {
    let took = ms(last.took);
    let pass = last.pass;
    if recording.source == TimeSource::Wall {
        return format!(
            "Pass {pass} took {took}. Faults made the runner wait {} of it.",
            per_cent(last.stalled, last.took)
        );
    }
    let parts = format!(
        "Pass {pass} took {took}: the link was busy for {}, the compute units for {}, and the runner stood \
         still for {} of it.",
        per_cent(last.link, last.took),
        per_cent(last.compute, last.took),
        per_cent(last.stalled, last.took)
    );
    let share = |part: Duration| part.as_secs_f64() / last.took.as_secs_f64().max(1e-12);
    let why = if last.took.is_zero() || last.copied_bytes == 0 {
        "Nothing had to be copied."
    } else if share(last.link) > 0.95 {
        "The link sets the pace: only fewer streamed bytes, so a larger card or smaller weights, make it \
         shorter."
    } else if share(last.compute) > 0.95 {
        "Compute sets the pace: the copies hide behind it."
    } else {
        "Neither works all the time: look below for where they wait for each other."
    };
    format!("{parts} {why}")
}

fn figures(recording: &Recording, accounts: &[Account], out: &mut dyn Write) -> io::Result<()> {
    let mut rows: Vec<(&str, String)> = vec![
        ("weights", format!("{} in {} units", format_size(recording.weights_bytes), recording.units.len())),
        (
            "card",
            format!(
                "{}, of which {} for weights and {} left free",
                format_size(recording.total_bytes),
                format_size(recording.budget_bytes),
                format_size(recording.headroom_bytes)
            ),
        ),
        (
            "on the card",
            format!(
                "{} stay, {} ring",
                format_size(recording.at_end.resident_bytes),
                format_size(recording.at_end.ring_bytes)
            ),
        ),
        ("page", format_size(recording.page_bytes)),
    ];
    if recording.runners > 1 {
        rows.push(("runner threads", recording.runners.to_string()));
    }
    writeln!(out, "<h2>Figures</h2><table>")?;
    for (name, value) in rows {
        writeln!(out, "<tr><th>{name}</th><td>{}</td></tr>", escaped(&value))?;
    }
    writeln!(
        out,
        "</table><table><tr><th class=\"n\">pass</th><th class=\"n\">took</th><th class=\"n\">copied</th>\
         <th class=\"n\">link busy</th><th class=\"n\">computing</th><th class=\"n\">stalled</th></tr>"
    )?;
    for account in shown_passes(accounts) {
        let Some(account) = account else {
            writeln!(out, "<tr><td class=\"n\">…</td></tr>")?;
            continue;
        };
        let known = recording.source == TimeSource::Modelled;
        let busy = |part: Duration| {
            if known { per_cent(part, account.took) } else { "not seen".to_owned() }
        };
        writeln!(
            out,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            account.pass,
            ms(account.took),
            format_size(account.copied_bytes),
            busy(account.link),
            busy(account.compute),
            per_cent(account.stalled, account.took)
        )?;
    }
    writeln!(out, "</table>")
}

/// The first passes and the last, with a gap between if there are many.
fn shown_passes(accounts: &[Account]) -> Vec<Option<&Account>> {
    const FIRST: usize = 5;
    const LAST: usize = 5;
    if accounts.len() <= FIRST + LAST + 1 {
        return accounts.iter().map(Some).collect();
    }
    let first = accounts[..FIRST].iter().map(Some);
    let last = accounts[accounts.len() - LAST..].iter().map(Some);
    first.chain([None]).chain(last).collect()
}

fn timelines(
    recording: &Recording,
    accounts: &[Account],
    slow: &[SlowUnit],
    out: &mut dyn Write,
) -> io::Result<()> {
    let (Some(first), Some(last)) = (recording.passes.first(), recording.passes.last()) else {
        return Ok(());
    };
    let whole = TimeSpan { start: first.time.start, end: last.time.end };
    writeln!(out, "<h2>Link, compute and stalls over all passes</h2>")?;
    figure(
        out,
        &lanes::draw(recording, whole, lanes_of(recording), &[])?,
        &lane_keys(recording),
        "How to read it: each lane is cut into columns, and a column is as high as the share of its time that \
         was used. Where the red lane is high and the blue one full, the runner waits for the link; where red \
         is high and blue is not, bytes were asked for too late.",
    )?;
    if recording.passes.len() < 2 {
        return Ok(());
    }
    // Of the steady passes the slowest: the one that somebody asks about.
    let slowest = accounts
        .iter()
        .filter(|account| is_steady(recording, account.pass))
        .max_by_key(|account| (account.took, std::cmp::Reverse(account.pass)));
    let Some(pass) = slowest
        .and_then(|account| recording.passes.iter().find(|pass| pass.number == account.pass))
        .filter(|pass| !pass.time.length().is_zero())
    else {
        return Ok(());
    };
    let markers: Vec<Marker> = (1..)
        .zip(slow)
        .filter_map(|(number, unit)| {
            let own = recording.stalls.iter().filter(|stall| {
                stall.unit == Some(unit.unit)
                    && stall.time.start >= pass.time.start
                    && stall.time.start < pass.time.end
            });
            let longest = own.max_by_key(|stall| stall.time.length())?;
            Some(Marker { number, at: longest.time.start.after(longest.time.length() / 2) })
        })
        .collect();
    writeln!(out, "<h2>The slowest pass after the first: pass {}</h2>", pass.number)?;
    figure(
        out,
        &lanes::draw(recording, pass.time, lanes_of(recording), &markers)?,
        &lane_keys(recording),
        "How to read it: as above, for one pass. The numbers stand where the runner stood still longest; they \
         are those of the table of slow units below. Where two would overlap the slower one is shown.",
    )
}

fn lanes_of(recording: &Recording) -> Vec<Lane<'_>> {
    let stalls = Box::new(recording.stalls.iter().map(|stall| stall.time));
    if recording.source == TimeSource::Wall {
        return vec![Lane {
            title: "faults: share of the time that the runner's thread waited",
            color: STALL,
            spans: stalls,
            empty: "no fault made the runner wait",
        }];
    }
    vec![
        Lane {
            title: "link to the card: share of the time that it copied",
            color: LINK,
            spans: Box::new(recording.copies.iter().map(|copy| copy.time)),
            empty: "nothing was copied",
        },
        Lane {
            title: "compute units: share of the time that they worked",
            color: COMPUTE,
            spans: Box::new(recording.compute.iter().map(|compute| compute.time)),
            empty: "no compute was charged (--compute-per-gib)",
        },
        Lane {
            title: "runner: share of the time that its stream stood still for bytes",
            color: STALL,
            spans: stalls,
            empty: "it never stood still",
        },
    ]
}

fn lane_keys(recording: &Recording) -> Vec<(RGBColor, &'static str)> {
    if recording.source == TimeSource::Wall {
        return vec![(STALL, "a fault waits")];
    }
    vec![(LINK, "the link copies"), (COMPUTE, "the card computes"), (STALL, "a runner stands still")]
}

fn residency(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let residency = &recording.residency;
    if residency.samples.is_empty() || residency.rows() == 0 {
        return Ok(());
    }
    writeln!(out, "<h2>Where every page was</h2>")?;
    let keys: Vec<_> = map::LEGEND.iter().map(|(shade, words)| (shade.color(), *words)).collect();
    let rows = if residency.pages_per_row == 1 {
        format!("Each row is one page of {}.", format_size(recording.page_bytes))
    } else {
        format!(
            "Each row is {} neighbouring pages, {}. It is dark blue only if all of them stay, so a single \
             streamed page among them still shows.",
            residency.pages_per_row,
            format_size(recording.page_bytes * u64::from(residency.pages_per_row))
        )
    };
    figure(
        out,
        &map::draw(residency)?,
        &keys,
        &format!(
            "How to read it: the model's pages from top to bottom in the order of the file, time from left to \
             right, with a line where a pass begins. {rows} Blue rows are there whenever they are needed; orange \
             moves down through the model in each pass, and is what crosses the link. There are {} samples; what \
             came and went between two of them is not seen.",
            residency.samples.len()
        ),
    )
}

fn slow_units(recording: &Recording, slow: &[SlowUnit], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "<h2>Units that runners waited for longest</h2>")?;
    if slow.is_empty() {
        return writeln!(out, "<p>No runner waited for any unit after the first pass.</p>");
    }
    let known = recording.source == TimeSource::Modelled;
    writeln!(
        out,
        "<table><tr><th class=\"n\">#</th><th>unit</th><th class=\"n\">stalled a pass</th>\
         <th class=\"n\">at worst</th>{}</tr>",
        if known { "<th class=\"n\">streamed for it</th><th class=\"n\">its compute</th>" } else { "" }
    )?;
    for (number, unit) in (1..).zip(slow) {
        write!(
            out,
            "<tr><td class=\"n\">{number}</td><td class=\"u\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{} (pass {})</td>",
            escaped(&shortened(&recording.unit_name(unit.unit))),
            ms(unit.stalled),
            ms(unit.worst),
            unit.worst_pass
        )?;
        if known {
            write!(
                out,
                "<td class=\"n\">{}</td><td class=\"n\">{}</td>",
                format_size(unit.copied_bytes),
                ms(unit.compute)
            )?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(
        out,
        "</table><p class=\"how\">Means over the passes after the first. {}</p>",
        if known {
            "A unit stalls the runner when its streamed bytes take longer over the link than the compute \
             before it covers. A copy that holds bytes of several units is counted with the first of them."
        } else {
            ""
        }
    )
}

/// A picture with its legend and a sentence below.
fn figure(out: &mut dyn Write, svg: &str, keys: &[(RGBColor, &'static str)], words: &str) -> io::Result<()> {
    writeln!(out, "<figure>{svg}<div>")?;
    for (RGBColor(r, g, b), words) in keys {
        writeln!(
            out,
            "<span class=\"key\"><i style=\"background:#{r:02x}{g:02x}{b:02x}\"></i>{}</span>",
            escaped(words)
        )?;
    }
    writeln!(out, "</div><figcaption>{}</figcaption></figure>", escaped(words))
}

fn ms(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1e3;
    if ms >= 1000.0 {
        format!("{:.2} s", ms / 1e3)
    } else if ms >= 10.0 || duration.is_zero() {
        format!("{ms:.1} ms")
    } else {
        format!("{ms:.3} ms")
    }
}

fn per_cent(part: Duration, whole: Duration) -> String {
    if whole.is_zero() {
        return "0 %".to_owned();
    }
    let share = part.as_secs_f64() / whole.as_secs_f64() * 100.0;
    if share > 0.0 && share < 1.0 { format!("{share:.1} %") } else { format!("{share:.0} %") }
}

/// A name that a table can hold.
fn shortened(name: &str) -> String {
    const MOST: usize = 120;
    match name.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}…", &name[..cut]),
        None => name.to_owned(),
    }
}

/// `text` as it may stand in HTML.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => {
                let _ = escaped.write_char(c);
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_write_html() {
        assert_eq!(escaped("<script>\"a\" & 'b'"), "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;");
        assert_eq!(short_name("/a/b\u{202e}c.safetensors"), "b\u{fffd}c.safetensors");
        assert!(shortened(&"x".repeat(1 << 20)).len() < 200);
    }

    #[test]
    fn shares_and_times_are_for_people() {
        assert_eq!(per_cent(Duration::from_millis(1), Duration::from_millis(2)), "50 %");
        assert_eq!(per_cent(Duration::from_micros(3), Duration::from_millis(1)), "0.3 %");
        assert_eq!(per_cent(Duration::ZERO, Duration::ZERO), "0 %");
        assert_eq!(ms(Duration::from_micros(1234)), "1.234 ms");
        assert_eq!(ms(Duration::from_millis(2500)), "2.50 s");
    }
}
