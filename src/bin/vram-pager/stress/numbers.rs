//! Numbers from a seed: the same for the same seed and place, on every machine.

/// A small generator (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct Numbers(u64);

/// One round of splitmix64's mixing.
pub(super) fn mix(value: u64) -> u64 {
    let mut x = value;
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Numbers {
    /// The numbers of `place` (a thread, a file) under `seed`.
    pub(super) fn new(seed: u64, place: u64) -> Self {
        Self(mix(mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)) ^ place.wrapping_mul(0xD6E8_FEB8_6659_FD93)))
    }

    /// The next number.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `limit`; 0 if that is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// A place in something of this length, which is not empty.
    pub(super) fn place(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    /// One of these.
    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.place(from.len())]
    }

    /// True so many times in a thousand.
    pub(super) fn per_mille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_places_differ() {
        let all = |seed, place| {
            let mut numbers = Numbers::new(seed, place);
            (0..16).map(|_| numbers.next()).collect::<Vec<_>>()
        };
        assert_eq!(all(1, 2), all(1, 2));
        assert_ne!(all(1, 2), all(1, 3));
        assert_ne!(all(1, 2), all(2, 2));
    }
}
