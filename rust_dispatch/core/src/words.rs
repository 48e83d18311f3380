//! Words of others in a line of ours.

/// Characters of the two ends of a line that is too long: what was seen is at its front, what is
/// needed at its back.
const FRONT_CHARS: usize = 600;
const BACK_CHARS: usize = 300;

/// `text` as one line that a terminal can show: control characters are escaped, and of what is too
/// long the middle is left out. For errors that quote a file, an option or a name that nobody
/// trusts.
///
/// ```
/// use lowlat_core::words::one_line;
/// assert_eq!(one_line("unknown field `a\nb`"), "unknown field `a\\nb`");
/// ```
#[must_use]
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for letter in text.chars() {
        // Separators and changes of direction would also break a line, or turn it around.
        let turns = matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if letter.is_control() || turns {
            line.extend(letter.escape_default());
        } else {
            line.push(letter);
        }
    }
    let place = |idx: usize| line.char_indices().nth(idx).map(|(place, _)| place);
    if let Some((front, _)) = place(FRONT_CHARS).zip(place(FRONT_CHARS + BACK_CHARS)) {
        let back = line.char_indices().rev().nth(BACK_CHARS - 1);
        let back = back.map_or(front, |(place, _)| place);
        return format!("{}...{}", &line[..front], &line[back..]);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_and_is_cut() {
        assert_eq!(
            one_line("widths are [6] · ≤ 1 µs"),
            "widths are [6] · ≤ 1 µs"
        );
        assert_eq!(
            one_line("a\nb\0\u{1b}[31m\u{202e}"),
            "a\\nb\\u{0}\\u{1b}[31m\\u{202e}"
        );
        let fits = "x".repeat(FRONT_CHARS + BACK_CHARS);
        assert_eq!(one_line(&fits), fits);
        let long = one_line(&format!("seen {}; needed y", "µ".repeat(5000)));
        assert!(long.starts_with("seen µ") && long.ends_with("µ; needed y"));
        assert_eq!(long.chars().count(), FRONT_CHARS + 3 + BACK_CHARS);
    }
}
