//! How one op runs.
