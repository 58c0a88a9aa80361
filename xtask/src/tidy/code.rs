//! A minimal Rust lexer that separates code from comments and literals, to the extent that the
//! rules need.

/// Blanks every comment and the inside of every string and character literal; the line structure
/// stays.
pub(super) fn without_comments_and_literals(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < characters.len() {
        let end = skip(&characters, at);
        if end == at {
            code.push(characters[at]);
            at += 1;
        } else {
            code.extend(characters[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    code
}

/// Returns the position, in characters, and the content of each string literal, except raw ones.
pub(super) fn string_literals(text: &str) -> Vec<(usize, String)> {
    let characters: Vec<char> = text.chars().collect();
    let mut literals = Vec::new();
    let mut at = 0;
    while at < characters.len() {
        let end = skip(&characters, at);
        // A quote that is the last character of the text has no content: its range would be
        // inverted.
        if end > at + 1 && characters[at] == '"' {
            literals.push((at, characters[at + 1..end - 1].iter().collect()));
        }
        at = end.max(at + 1);
    }
    literals
}

/// Returns the end of the comment or literal that starts at `at`, or `at` itself if none does.
fn skip(text: &[char], at: usize) -> usize {
    match (text[at], text.get(at + 1)) {
        ('/', Some('/')) => find(text, at, |c| c == '\n'),
        ('/', Some('*')) => skip_block_comment(text, at),
        ('"', _) => skip_quoted(text, at + 1, '"'),
        ('r', Some('"' | '#')) if !continues_word(text, at) => skip_raw(text, at),
        ('\'', _) => skip_character(text, at),
        _ => at,
    }
}

/// Whether the preceding character continues an identifier; the `b` of `br"..."` does not.
fn continues_word(text: &[char], at: usize) -> bool {
    at.checked_sub(1)
        .is_some_and(|before| text[before] != 'b' && (text[before].is_alphanumeric() || text[before] == '_'))
}

fn find(text: &[char], from: usize, stop: impl Fn(char) -> bool) -> usize {
    text[from..].iter().position(|c| stop(*c)).map_or(text.len(), |distance| from + distance)
}

fn skip_block_comment(text: &[char], at: usize) -> usize {
    // Block comments nest in Rust.
    let (mut depth, mut at) = (0usize, at);
    while at < text.len() {
        match (text[at], text.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) if depth == 1 => return at + 2,
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn skip_quoted(text: &[char], from: usize, quote: char) -> usize {
    let mut at = from;
    while at < text.len() && text[at] != quote {
        // The character after a backslash never ends a literal.
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    // A backslash at the end of the text makes `at` exceed the length.
    (at + 1).min(text.len())
}

fn skip_raw(text: &[char], at: usize) -> usize {
    let hashes = text[at + 1..].iter().take_while(|c| **c == '#').count();
    let open = at + 1 + hashes;
    // Without a quote it is a raw identifier, such as `r#type`.
    if text.get(open) != Some(&'"') {
        return at;
    }
    let mut end = open + 1;
    while end < text.len() {
        let closing = text[end] == '"' && text[end + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
        if closing {
            return end + 1 + hashes;
        }
        end += 1;
    }
    end
}

/// Skips a character literal, `'x'` or `'\...'`, but not a lifetime.
fn skip_character(text: &[char], at: usize) -> usize {
    if text.get(at + 1) == Some(&'\\') || text.get(at + 2) == Some(&'\'') {
        return skip_quoted(text, at + 1, '\'');
    }
    at
}

/// Returns the 1-based numbers of the lines that contain `word` as a whole word.
pub(super) fn lines_with_word<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    code.lines().enumerate().filter_map(move |(index, line)| {
        let found = line.match_indices(word).any(|(start, _)| {
            !line[..start].ends_with(is_part) && !line[start + word.len()..].starts_with(is_part)
        });
        found.then_some(index + 1)
    })
}

/// Returns the number of lines before the module of unit tests, which is the last item of a file.
pub(super) fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_tests = |at: usize| {
        let mut item = lines.iter().skip(at).skip_while(|line| line.starts_with("#["));
        item.next().is_some_and(|item| item.starts_with("mod ") && item.ends_with('{'))
    };
    let starts = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.starts_with("#[cfg(test") || line.starts_with("#[cfg(all(test"));
    let mut starts = starts.map(|(at, _)| at).filter(|at| is_tests(*at));
    starts.next().unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_stays() {
        let table = [
            ("a // unsafe\nb", "a          \nb"),
            ("/* x /* y */ z */ b", "                  b"),
            (r#"f("unsafe \" x", y)"#, "f(             , y)"),
            (r##"f(r#"a"b"#, y)"##, "f(        , y)"),
            ("fn f<'a>(x: &'a str, c: char) { c == 'x' }", "fn f<'a>(x: &'a str, c: char) { c ==     }"),
            (r"c == '\'' || d", "c ==      || d"),
            ("\"never closed", "             "),
        ];
        for (text, code) in table {
            assert_eq!(without_comments_and_literals(text), code, "{text}");
        }
    }

    #[test]
    fn literals_have_places() {
        let literals = string_literals("f(\"a\", '\"', \"b\\\"c\") // \"d\"");
        assert_eq!(literals, [(2, "a".to_owned()), (12, "b\\\"c".to_owned())]);
    }

    #[test]
    fn words_are_whole() {
        let code = "unsafe {}\nunsafe_code\nx unsafe fn\nmyunsafe";
        assert_eq!(lines_with_word(code, "unsafe").collect::<Vec<_>>(), [1, 3]);
    }
}
