//! A stand-in for the CUDA driver: the emulated device under the driver's C names.
//!
//! With it every line of `device::cuda` runs on a machine without a card, and any other program that
//! speaks to the driver can share that card. It is asynchronous and stream-ordered, and strict where the
//! driver's documentation is: handles, sizes, alignment, whole mappings, access rights. Misuse is answered
//! with the documented code and told loudly on standard error.
//!
//! ```text
//! cargo rustc --example cuda_standin -- -C link-arg=-Wl,-soname,libcuda.so.1
//! mkdir -p standin && cp target/debug/examples/libcuda_standin.so standin/libcuda.so.1
//! ln -sf libcuda.so.1 standin/libcuda.so
//! LD_LIBRARY_PATH=standin vram-pager devices
//! ```
//!
//! | environment variable | meaning | default |
//! |---|---|---|
//! | `VRAM_PAGER_STANDIN_BYTES` | size of each card | `256MiB` |
//! | `VRAM_PAGER_STANDIN_DEVICES` | how many cards | `1` |
//! | `VRAM_PAGER_STANDIN_PAGE` | granularity | `2MiB` |
//! | `VRAM_PAGER_STANDIN_VMM` | `1`; `0`: no virtual memory; `refuse`: claimed, but the first call fails | `1` |
//! | `VRAM_PAGER_STANDIN_POOLS` | `1`; `0`: no stream-ordered pools | `1` |
//! | `VRAM_PAGER_STANDIN_VERSION` | the driver's version | `12060` |
//! | `VRAM_PAGER_STANDIN_MISSING` | names, comma-separated, that the library does not export | |
//! | `VRAM_PAGER_STANDIN_FAIL` | `NAME@N=CODE`, comma-separated: the Nth call of that name (`*` for any) fails with that code; `@N+` from then on | |
//! | `VRAM_PAGER_STANDIN_MISUSE` | `log`, or `abort` the process at the first misuse | `log` |
//! | `VRAM_PAGER_STANDIN_BACKING` | `host`; `none`: memory has addresses and accounts, but no bytes | `host` |
//! | `VRAM_PAGER_STANDIN_DELAYS` | a seed: work completes late, by up to 0.4 ms | `0` |
//!
//! A test in the same process finds hooks beside the driver's names: `vram_pager_standin_*`, in
//! [`hooks`]. One lock guards all tables; it is never held while waiting.

#![expect(unsafe_code, reason = "a C interface over raw pointers")]
#![expect(unreachable_pub, reason = "exported to C")]

#[macro_use]
mod state;
mod codes;
mod context;
mod copies;
mod hide;
mod hooks;
mod host;
mod kernels;
mod memory;
mod pool;
mod procs;
mod settings;
mod streams;
