//! Errors inside the printed program: each below the line of the entity it is about, as a comment, so that the text still parses.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::text::{Place, Printed};

/// An error that names the entity it is about.
pub trait Located: Display {
    fn place(&self) -> Place;
}

/// The text with each error below its line; errors about what is not in the text come last.
pub fn annotate<E: Located>(printed: &Printed, errors: &[E]) -> String {
    let lines: BTreeMap<Place, u32> = printed.lines.iter().rev().copied().collect();
    let mut at_line: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for error in errors {
        at_line.entry(lines.get(&error.place()).copied().unwrap_or(u32::MAX)).or_default().push(comment(error));
    }
    let mut out = String::with_capacity(printed.text.len() + 80 * errors.len());
    for (number, line) in printed.text.lines().enumerate() {
        out.push_str(line);
        out.push('\n');
        let indent = line.len() - line.trim_start().len();
        for error in at_line.remove(&(number as u32)).unwrap_or_default() {
            out.push_str(&line[..indent]);
            out.push_str(&error);
        }
    }
    at_line.into_values().flatten().for_each(|error| out.push_str(&error));
    out
}

fn comment(error: &impl Display) -> String {
    format!("// error: {}\n", error.to_string().replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entity::DimId;

    #[derive(Debug, thiserror::Error)]
    #[error("{what}")]
    struct Wrong {
        what: &'static str,
        place: Place,
    }

    impl Located for Wrong {
        fn place(&self) -> Place {
            self.place
        }
    }

    #[test]
    fn errors_stand_below_their_lines_and_the_rest_at_the_end() {
        let graph = crate::text::parse_graph("graph \"g\" dim b = 2 dim c = 3").expect("good text");
        let errors = [("b", Place::Dim(DimId(0))), ("lost", Place::Dim(DimId(9))), ("all", Place::Top), ("b too", Place::Dim(DimId(0)))];
        let errors = errors.map(|(what, place)| Wrong { what, place });
        let text = annotate(&crate::text::graph_printed(&graph), &errors);
        assert_eq!(text, "graph \"g\"\n// error: all\ndim b = 2\n// error: b\n// error: b too\ndim c = 3\n// error: lost\n");
        assert_eq!(crate::text::parse_graph(&text).as_ref(), Ok(&graph));
    }
}
