//! The C face of lowlat-core
