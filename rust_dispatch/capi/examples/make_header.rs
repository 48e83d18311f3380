//! Writes `include/lowlat/dispatch.h`: `cargo run -p lowlat-capi --example make_header`.

#[path = "../header.rs"]
mod header;

fn main() -> std::io::Result<()> {
    std::fs::write(header::path(), header::text())
}
