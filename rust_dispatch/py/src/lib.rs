//! The Python face of lowlat-core: module lowlat._dispatch
