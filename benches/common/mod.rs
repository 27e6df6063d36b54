//! What the benches share: models without bytes, cards, passes, the offline optimum, tables.
//!
//! A model is the header of a safetensors file and a hole behind it, so that a layout of any size costs
//! no disk. A card is emulated, with `bytes=none` unless a bench moves real bytes.

#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, reason = "each bench uses a part of it")]

pub mod alloc;
pub mod card;
pub mod models;
pub mod null;
pub mod optimum;
pub mod table;

/// What a bench's steps answer.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// A deterministic stream of numbers (splitmix64), so that a row means the same everywhere.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Evenly from `from` to just below `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from).max(1)
    }

    /// Evenly from 0 to just below 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
