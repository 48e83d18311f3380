//! Numbers, times and foreign text as a person reads them.

/// A count with a comma between thousands.
///
/// ```
/// use lowlat_engine::words::count;
/// assert_eq!((count(999).as_str(), count(1_234_567).as_str()), ("999", "1,234,567"));
/// ```
#[must_use]
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with three figures that count, and no exponent.
///
/// ```
/// use lowlat_engine::words::short;
/// let texts = [0.0, 0.0123, 1.5, 45.678, 1234.5].map(short);
/// assert_eq!(texts, ["0", "0.0123", "1.50", "45.7", "1,235"]);
/// ```
#[must_use]
pub fn short(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".into()
    } else if size >= 99.95 {
        let sign = if value < 0.0 { "-" } else { "" };
        format!("{sign}{}", count(size.round() as u64))
    } else {
        let digits = (2 - size.log10().floor() as i32).clamp(0, 9) as usize;
        format!("{value:.digits$}")
    }
}

/// Seconds in the unit that suits them: the number, and the unit.
///
/// ```
/// use lowlat_engine::words::time;
/// assert_eq!(time(0.000_012_3), ("12.3".into(), "us"));
/// assert_eq!(time(0.25), ("250".into(), "ms"));
/// assert_eq!(time(92.34), ("92.3".into(), "s"));
/// ```
#[must_use]
pub fn time(seconds: f64) -> (String, &'static str) {
    if seconds == 0.0 || seconds >= 0.9995 {
        (short(seconds), "s")
    } else if seconds >= 0.000_999_5 {
        (short(seconds * 1e3), "ms")
    } else {
        (short(seconds * 1e6), "us")
    }
}

/// Text of others, such as a file's name: what would not show, or would turn the text around it,
/// is written as an escape.
///
/// ```
/// use lowlat_engine::words::visible;
/// assert_eq!(visible("a\nb\u{202e}c"), "a\\u{a}b\\u{202e}c");
/// ```
#[must_use]
pub fn visible(text: &str) -> String {
    let hides = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
            || matches!(letter, '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if hides(letter) {
            out.extend(letter.escape_unicode());
        } else {
            out.push(letter);
        }
    }
    out
}
