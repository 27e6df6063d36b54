//! A card in host memory.
