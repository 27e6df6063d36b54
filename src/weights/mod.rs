//! Weight files: validated, indexed, and laid out in pages.
