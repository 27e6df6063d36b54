//! `vram-pager devices`: what is here, what each can do, and why one cannot be used.

use serde::Serialize;
use vram_pager::units::format_size;

use crate::Outcome;
use crate::output::{self, Align, Table};

/// List the devices of this machine, what each can do, and why one cannot be used
///
/// Virtual memory is tried with a real mapping, not asked for. Nothing is left on a card. That there is no
/// card is no failure: the emulated device is always there.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    vram-pager devices\n  \
    vram-pager devices --json\n\n\
    cap=SIZE makes a large card act as a small one: cuda:0,cap=8GiB.\n\
    link=RATE tells the rate of its link, which is measured otherwise: cuda:0,link=50GB/s.")]
pub(crate) struct Args {}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    devices: Vec<DeviceReport>,
}

/// One device; what it does not tell is null.
#[derive(Serialize, Default)]
struct DeviceReport {
    /// What `--device` takes.
    device: String,
    kind: &'static str,
    usable: bool,
    name: Option<String>,
    /// Why it cannot be used, and what to do.
    reason: Option<String>,
    total_bytes: Option<u64>,
    free_bytes: Option<u64>,
    /// The smallest frame; null without virtual memory.
    granularity_bytes: Option<u64>,
    virtual_memory: Option<bool>,
    /// Why there is no virtual memory.
    virtual_memory_reason: Option<String>,
    stream_ordered_pools: Option<bool>,
    kernels: Option<bool>,
    compute_capability: Option<String>,
    driver: Option<String>,
    /// Calls that the driver library does not export, of those that would be used.
    missing_symbols: Vec<String>,
}

/// Runs the subcommand.
pub(crate) fn run(_args: &Args, json: bool) -> Outcome {
    let mut devices = vec![emulated(), cpu()];
    devices.extend(cards());
    if json {
        return output::print_json(&Report { devices });
    }
    print_report(&devices)
}

fn emulated() -> DeviceReport {
    DeviceReport {
        device: "emulated:<size>".to_owned(),
        kind: "emulated",
        usable: true,
        name: Some("a card in host memory, of any size".to_owned()),
        granularity_bytes: Some(2 << 20),
        virtual_memory: Some(true),
        stream_ordered_pools: Some(true),
        kernels: Some(true),
        ..DeviceReport::default()
    }
}

/// The host itself: weights stay in the file and in host memory, nothing is paged.
fn cpu() -> DeviceReport {
    let name = format!(
        "this host, {} threads: holds weights, has no pages",
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    );
    DeviceReport {
        device: "cpu".to_owned(),
        kind: "cpu",
        usable: false,
        name: Some(name),
        reason: Some("the pager has nothing to do there; --device takes emulated: or cuda:".to_owned()),
        ..DeviceReport::default()
    }
}

#[cfg(not(feature = "cuda"))]
fn cards() -> Vec<DeviceReport> {
    vec![DeviceReport {
        device: "cuda".to_owned(),
        kind: "cuda",
        reason: Some("this build has no CUDA backend; build with the feature `cuda`".to_owned()),
        ..DeviceReport::default()
    }]
}

#[cfg(feature = "cuda")]
fn cards() -> Vec<DeviceReport> {
    vram_pager::device::cuda::devices().into_iter().map(card).collect()
}

#[cfg(feature = "cuda")]
fn card(probe: vram_pager::device::cuda::CardProbe) -> DeviceReport {
    let report = DeviceReport { device: probe.device, kind: "cuda", ..DeviceReport::default() };
    match probe.state {
        Err(error) => DeviceReport { reason: Some(error.to_string()), ..report },
        Ok(card) => DeviceReport {
            usable: true,
            name: Some(card.name),
            total_bytes: Some(card.total_bytes),
            free_bytes: Some(card.free_bytes),
            granularity_bytes: card.granularity.as_ref().ok().copied(),
            virtual_memory: Some(card.granularity.is_ok()),
            virtual_memory_reason: card.granularity.err(),
            stream_ordered_pools: Some(card.pools),
            kernels: Some(
                !card.missing_symbols.iter().any(|name| {
                    ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuLaunchKernel"].contains(name)
                }),
            ),
            compute_capability: card.compute_capability.map(|(major, minor)| format!("{major}.{minor}")),
            driver: Some(format!("CUDA {}.{}", card.driver_version / 1000, card.driver_version % 1000 / 10)),
            missing_symbols: card.missing_symbols.into_iter().map(str::to_owned).collect(),
            ..report
        },
    }
}

fn print_report(devices: &[DeviceReport]) -> Outcome {
    let size = |bytes: Option<u64>| bytes.map_or_else(String::new, format_size);
    let yes = |answer: Option<bool>| answer.map_or("", |yes| if yes { "yes" } else { "no" }).to_owned();
    let mut table = Table::new(&[
        ("device", Align::Left),
        ("usable", Align::Left),
        ("free", Align::Right),
        ("total", Align::Right),
        ("page", Align::Right),
        ("virtual memory", Align::Left),
        ("pools", Align::Left),
        ("kernels", Align::Left),
        ("what", Align::Left),
    ]);
    for device in devices {
        let mut what = device.name.clone().unwrap_or_default();
        for detail in
            [device.compute_capability.as_ref().map(|cc| format!("compute {cc}")), device.driver.clone()]
                .into_iter()
                .flatten()
        {
            what = format!("{what}, {detail}");
        }
        table.row([
            device.device.clone(),
            yes(Some(device.usable)),
            size(device.free_bytes),
            size(device.total_bytes),
            size(device.granularity_bytes),
            yes(device.virtual_memory),
            yes(device.stream_ordered_pools),
            yes(device.kernels),
            what,
        ]);
    }
    output::print(|out| {
        table.write(out)?;
        for device in devices {
            let name = &device.device;
            if let Some(reason) = &device.reason {
                writeln!(out, "{name}: {}", output::printable(reason))?;
            }
            if let Some(reason) = &device.virtual_memory_reason {
                writeln!(
                    out,
                    "{name}: no virtual memory, since {}; units are then whole, and an address holds for its \
                     guard only",
                    output::printable(reason)
                )?;
            }
            if !device.missing_symbols.is_empty() {
                writeln!(out, "{name}: its library does not export {}", device.missing_symbols.join(", "))?;
            }
        }
        Ok(())
    })
}
