//! Nothing: the tests of this package are those of the directory above. See `tests/sanitizers.sh`.
