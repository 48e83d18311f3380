//! Words of others in a line of ours.

/// Characters of a line that quotes something from outside; what is longer is cut.
const MAX_CHARS: usize = 900;

/// `text` as one line that a terminal can show: control characters are escaped, and what is too
/// long is cut. For errors that quote a file, an option or a name that nobody trusts.
///
/// ```
/// use lowlat_core::words::one_line;
/// assert_eq!(one_line("unknown field `a\nb`"), "unknown field `a\\nb`");
/// ```
#[must_use]
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len().min(MAX_CHARS));
    let mut num_chars = 0;
    for letter in text.chars() {
        if MAX_CHARS <= num_chars {
            line.push_str("...");
            break;
        }
        // Separators and changes of direction would also break a line, or turn it around.
        let turns = matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if letter.is_control() || turns {
            line.extend(letter.escape_default());
            num_chars += letter.escape_default().count();
        } else {
            line.push(letter);
            num_chars += 1;
        }
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
        let long = one_line(&"x".repeat(5000));
        assert_eq!(long.len(), MAX_CHARS + 3);
    }
}
