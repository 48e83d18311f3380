//! Stable 64-bit digests: FNV-1a over little-endian bytes, the same in every language.
//!
//! Field order is part of the meaning of a digest, so each user documents its own. The rules for a
//! value, which C++ code follows too:
//!
//! | value | bytes fed |
//! |---|---|
//! | `u8` | itself |
//! | `u32`, `u64` | little-endian, 4 or 8 bytes |
//! | text | its UTF-8 length as `u64`, then its bytes |
//! | list | its length as `u64`, then each element |

const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// A running FNV-1a digest.
///
/// ```
/// use lowlat_core::digest::Fnv1a;
/// // Published test vectors of 64-bit FNV-1a.
/// assert_eq!(Fnv1a::new().finish(), 0xcbf29ce484222325);
/// assert_eq!(Fnv1a::new().bytes(b"a").finish(), 0xaf63dc4c8601ec8c);
/// assert_eq!(Fnv1a::new().bytes(b"foobar").finish(), 0x85944171f73967e8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self::new()
    }
}

impl Fnv1a {
    /// The digest of nothing.
    pub const fn new() -> Self {
        Self(OFFSET_BASIS)
    }

    /// Feeds raw bytes, without their length.
    pub const fn bytes(self, bytes: &[u8]) -> Self {
        let mut state = self.0;
        let mut i = 0;
        while i < bytes.len() {
            state = (state ^ bytes[i] as u64).wrapping_mul(PRIME);
            i += 1;
        }
        Self(state)
    }

    /// Feeds one byte.
    pub const fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    /// Feeds four bytes, little-endian.
    pub const fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Feeds eight bytes, little-endian.
    pub const fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Feeds the length of `text` in bytes, then its bytes, so that ("ab", "c") differs from
    /// ("a", "bc").
    pub const fn text(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    /// The digest of everything that was fed.
    #[must_use]
    pub const fn finish(self) -> u64 {
        self.0
    }
}

/// Digests travel through JSON as text ("0x…", 16 digits): not every reader has 64-bit numbers.
pub(crate) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{value:#018x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() == 16);
        digits
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or_else(|| D::Error::custom(format!("{text:?} is no digest; 0x and 16 hex digits")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_length_prefixed() {
        let split = |a, b| Fnv1a::new().text(a).text(b).finish();
        assert_ne!(split("ab", "c"), split("a", "bc"));
    }

    #[test]
    fn numbers_are_little_endian() {
        assert_eq!(Fnv1a::new().u32(0x6162_6364), Fnv1a::new().bytes(b"dcba"));
        assert_eq!(
            Fnv1a::new().u64(0x61),
            Fnv1a::new().bytes(b"a\0\0\0\0\0\0\0")
        );
        assert_eq!(Fnv1a::new().u8(b'a').finish(), 0xaf63_dc4c_8601_ec8c);
    }
}
