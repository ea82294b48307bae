//! Signatures and descriptions of all functions, read from the header.

use std::fs;
use std::path::Path;

#[derive(Debug)]
pub(crate) struct Signature {
    pub(crate) name: String,
    /// Type of the result, without attributes.
    pub(crate) result: String,
    pub(crate) parameters: Vec<Parameter>,
    /// The comment above the declaration.
    pub(crate) description: String,
}

#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) kind: String,
    pub(crate) name: String,
}

impl Signature {
    /// All functions of the header, but not the inline ones, in its order.
    pub(crate) fn all() -> Vec<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/dsv4.h");
        let header = fs::read_to_string(path).expect("include/dsv4.h is there");
        let all: Vec<Self> = header.split("\n\n").filter(|b| b.contains("\nDSV4_API ")).map(Self::parse).collect();
        assert!(all.len() > 40, "only {} functions found", all.len());
        all
    }

    fn parse(block: &str) -> Self {
        let (description, declaration) = block.split_once("\nDSV4_API ").expect("filtered so");
        let declaration = declaration.replace('\n', " ");
        let declaration = declaration.trim_start_matches("DSV4_NODISCARD ");
        let (head, rest) = declaration.split_once('(').expect("a function has parentheses");
        let (parameters, _) = rest.split_once(')').expect("a function has parentheses");
        let (result, name) = split_name(head);
        let parameters = parameters.split(',').map(str::trim).filter(|p| *p != "void");
        let parameters = parameters.map(|parameter| {
            let (kind, name) = split_name(parameter);
            Parameter { kind, name }
        });
        Self { name, result, parameters: parameters.collect(), description: description.replace("\n// ", " ") }
    }
}

impl Parameter {
    pub(crate) fn is_pointer(&self) -> bool {
        self.kind.contains('*') || self.kind.ends_with("_callback")
    }
}

/// `const char *text` to `const char *` and `text`.
fn split_name(declaration: &str) -> (String, String) {
    let declaration = declaration.trim();
    let at = declaration.rfind([' ', '*']).expect("a declaration has a type and a name") + 1;
    (declaration[..at].trim().to_owned(), declaration[at..].to_owned())
}
