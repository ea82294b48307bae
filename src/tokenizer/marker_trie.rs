//! The added tokens of a tokenizer as a byte trie: leftmost, longest literal match.
//!
//! It answers in time linear in the text (times the longest marker) however many markers share a
//! prefix, and V4's 1,283 nearly all start with `<｜`.

use std::ops::Range;

use crate::TokenId;

/// Set of markers with their ids. Invariant: node 0 is the root and every other node is reachable.
pub(super) struct MarkerTrie {
    nodes: Vec<Node>,
}

#[derive(Default)]
struct Node {
    /// (byte, node) pairs, sorted by byte.
    children: Vec<(u8, usize)>,
    id: Option<TokenId>,
}

impl Default for MarkerTrie {
    fn default() -> Self {
        Self { nodes: vec![Node::default()] }
    }
}

impl MarkerTrie {
    /// Adds a marker; false when it was there already (its first id stays).
    pub(super) fn insert(&mut self, marker: &str, id: TokenId) -> bool {
        let mut at = 0;
        for byte in marker.bytes() {
            at = match self.nodes[at].child(byte) {
                Ok(slot) => self.nodes[at].children[slot].1,
                Err(slot) => {
                    let new = self.nodes.len();
                    self.nodes.push(Node::default());
                    self.nodes[at].children.insert(slot, (byte, new));
                    new
                }
            };
        }
        let is_new = self.nodes[at].id.is_none();
        self.nodes[at].id.get_or_insert(id);
        is_new
    }

    /// Id of exactly this marker.
    pub(super) fn get(&self, marker: &str) -> Option<TokenId> {
        let mut at = 0;
        for byte in marker.bytes() {
            at = self.next(at, byte)?;
        }
        self.nodes[at].id
    }

    /// First marker in `text` (the longest one at that place): its byte range and id.
    pub(super) fn find(&self, text: &str) -> Option<(Range<usize>, TokenId)> {
        let bytes = text.as_bytes();
        (0..bytes.len()).find_map(|start| {
            let (len, id) = self.longest_prefix(&bytes[start..])?;
            Some((start..start + len, id))
        })
    }

    /// Ids of all markers.
    pub(super) fn ids(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.nodes.iter().filter_map(|node| node.id)
    }

    fn longest_prefix(&self, bytes: &[u8]) -> Option<(usize, TokenId)> {
        let (mut at, mut longest) = (0, None);
        for (index, &byte) in bytes.iter().enumerate() {
            let Some(next) = self.next(at, byte) else { break };
            at = next;
            if let Some(id) = self.nodes[at].id {
                longest = Some((index + 1, id));
            }
        }
        longest
    }

    fn next(&self, at: usize, byte: u8) -> Option<usize> {
        let node = &self.nodes[at];
        node.child(byte).ok().map(|slot| node.children[slot].1)
    }
}

impl Node {
    fn child(&self, byte: u8) -> Result<usize, usize> {
        self.children.binary_search_by_key(&byte, |&(b, _)| b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trie(markers: &[&str]) -> MarkerTrie {
        let mut trie = MarkerTrie::default();
        for (id, marker) in (0..).zip(markers) {
            assert!(trie.insert(marker, id));
        }
        trie
    }

    #[test]
    fn leftmost_marker_wins_and_the_longest_one_there() {
        let trie = trie(&["<a", "<ab>", "b>"]);
        assert_eq!(trie.find("x<ab>"), Some((1..5, 1)));
        assert_eq!(trie.find("x<ab"), Some((1..3, 0)));
        assert_eq!(trie.find("ab>"), Some((1..3, 2)));
        assert_eq!(trie.find("<b <"), None);
        assert_eq!(trie.find(""), None);
    }

    #[test]
    fn a_marker_is_found_by_its_exact_spelling_only() {
        let mut trie = trie(&["<a", "<ab>"]);
        assert_eq!(trie.get("<ab>"), Some(1));
        assert_eq!(trie.get("<ab"), None);
        assert_eq!(trie.get(""), None);
        assert!(!trie.insert("<a", 9));
        assert_eq!(trie.get("<a"), Some(0));
    }
}
