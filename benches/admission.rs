//! What do the manager's own decisions cost with a long ledger?
//!
//! The models are sizes and the cards are books, so nearly all of the time is the manager's. Aim: under a
//! millisecond with 1,000 entries, growing as n log n.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vram_pager::manager::{FreeOptions, HostFigures, HostMemoryFigures, LoadOptions, Manager, ManagerError};
use vram_pager::patcher::{ModelPatcher, Place, SizedCard, SizedModel, SizedSpec};

const MIB: u64 = 1 << 20;
const GPU: Place = Place::Card(0);

/// A large machine that costs nothing to ask.
struct LargeHost;

impl HostMemoryFigures for LargeHost {
    fn read(&self) -> Result<HostFigures, ManagerError> {
        let ram = 1 << 40;
        Ok(HostFigures { ram_total: ram, ram_available: ram, cgroup_limit: None, swap_total: 0 })
    }
}

struct Full {
    manager: Manager,
    models: Vec<Arc<dyn ModelPatcher>>,
    newcomer: Arc<dyn ModelPatcher>,
}

/// A card on which `entries` models are listed, with room for some more.
fn full(entries: u64, dynamic: bool) -> Full {
    let card = SizedCard::new("bench", entries * MIB + 2048 * MIB);
    let manager = Manager::over(vec![Arc::clone(&card) as _], Arc::new(LargeHost));
    let make = |index: u64| -> Arc<dyn ModelPatcher> {
        let label = format!("m{index}");
        SizedModel::new(SizedSpec { label, size: MIB, granule: MIB, dynamic, ..SizedSpec::default() }, &card)
    };
    let models: Vec<_> = (0..entries).map(make).collect();
    manager.load_models_gpu(&models, LoadOptions::default()).expect("sizes always load");
    Full { newcomer: make(entries), manager, models }
}

fn admission(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    group.sample_size(20);
    for entries in [100_u64, 1_000, 10_000] {
        group.throughput(Throughput::Elements(entries));
        let name = |what| BenchmarkId::new(what, entries);

        let resident = full(entries, false);
        group.bench_function(name("free_memory that asks nobody"), |bencher| {
            bencher.iter(|| black_box(resident.manager.free_memory(MIB, Some(GPU), &FreeOptions::default())));
        });
        let paged = full(entries, true);
        let for_dynamic = FreeOptions { for_dynamic: true, ..FreeOptions::default() };
        group.bench_function(name("free_memory for paged models"), |bencher| {
            bencher.iter(|| black_box(paged.manager.free_memory(u64::MAX / 2, Some(GPU), &for_dynamic)));
        });
        group.bench_function(name("load_models_gpu of one more"), |bencher| {
            bencher.iter(|| resident.manager.load_model_gpu(&resident.newcomer, LoadOptions::default()));
        });
        group.bench_function(name("load_models_gpu of all again"), |bencher| {
            bencher.iter(|| resident.manager.load_models_gpu(&resident.models, LoadOptions::default()));
        });
        group.bench_function(name("free_memory that unloads all"), |bencher| {
            bencher.iter_batched(
                || full(entries, false),
                |full| {
                    let gone = full.manager.free_memory(u64::MAX / 2, Some(GPU), &FreeOptions::default());
                    (gone, full)
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, admission);
criterion_main!(benches);
