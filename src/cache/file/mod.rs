//! Files with pages of the cache: sessions, and blocks of the disk tier.
//!
//! A file is a header, two roots and sections, all integers little-endian, all offsets and lengths 64 bits:
//!
//! ```text
//! header   magic, byte order, versions, what the file holds, the [`Identity`] of what wrote it; xxh3; whole pages of 4096
//! root 0   a page of which 64 bytes are used: generation, place and xxh3 of a table, end of the data; xxh3
//! root 1   as root 0; the valid root with the higher generation counts
//! data     sections and tables: a table names sections by kind, offset, length and xxh3, and at most one other table,
//!          whose sections count as its own; the root names the table of one save
//! ```
//!
//! A new file is written under another name, synchronised and renamed. A later save may append to it: new sections and a
//! new table go behind the end that the current root gives, are synchronised, and then the *other* root is written. So at
//! every moment one root describes a complete save, and nothing it describes is ever written again.
//!
//! Readers skip sections of unknown kinds unless they are marked as required, and refuse files whose oldest reader is
//! newer than they are. No number from a file is believed before it was compared with the file's real size. Knows nothing
//! of sessions, tokens or devices: what goes into sections and comes out of them is bytes.
#![forbid(unsafe_code)]

mod format;
mod read;
mod write;

pub use format::{Content, Header, Identity, Section, VERSION};
pub use read::{Container, SectionReader};
pub use write::{SectionWriter, Writer, check_replaceable, resolve, sweep_all};
