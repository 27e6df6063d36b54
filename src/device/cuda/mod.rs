//! A card behind the CUDA driver.
