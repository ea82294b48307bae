//! `include/dsv4.h` is written from `src/ffi` and says what is there: sections in reading order, each the documentation
//! and the items of one file. `UPDATE_HEADER=1 cargo test --test header` rewrites it; otherwise a difference is an error.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use dsv4::ffi::testing::SECTIONS;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header_path() -> PathBuf {
    root().join("include/dsv4.h")
}

#[test]
fn the_committed_header_is_the_generated_one() {
    let generated = generate();
    if env::var_os("UPDATE_HEADER").is_some() {
        fs::create_dir_all(root().join("include")).expect("include/ can be made");
        fs::write(header_path(), &generated).expect("the header can be written");
    }
    let committed = fs::read_to_string(header_path()).expect("include/dsv4.h is there");
    let differs = generated.lines().zip(committed.lines()).position(|(a, b)| a != b);
    if let Some(i) = differs {
        let line = |text: &str| text.lines().nth(i).unwrap_or_default().to_owned();
        panic!(
            "include/dsv4.h line {}:\n  is       {}\n  should be {}\nrun UPDATE_HEADER=1 cargo test --test header",
            i + 1,
            line(&committed),
            line(&generated)
        );
    }
    assert_eq!(generated.len(), committed.len(), "one header is longer: UPDATE_HEADER=1 cargo test --test header");
}

#[test]
fn the_header_compiles_alone_in_every_supported_language() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (name, compiler, standard) in [
        ("alone.c", "cc", "c99"),
        ("alone.c", "cc", "c11"),
        ("alone.c", "cc", "c17"),
        ("alone.cpp", "c++", "c++11"),
        ("alone.cpp", "c++", "c++17"),
    ] {
        let source = dir.path().join(name);
        // twice, to see that the include guard works, and with what a program does first
        let body = "#include <dsv4.h>\n#include <dsv4.h>\n\
                    int main(void) { dsv4_engine_options o; dsv4_engine_options_init(&o); return o.size == 0; }\n";
        fs::write(&source, body).expect("the source can be written");
        let output = Command::new(compiler)
            .args([
                &format!("-std={standard}"),
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Wconversion",
                "-Wshadow",
                "-Werror",
            ])
            .args(["-fsyntax-only", "-I"])
            .arg(root().join("include"))
            .arg(&source)
            .output()
            .unwrap_or_else(|e| panic!("{compiler}: {e}"));
        assert!(output.status.success(), "{standard}:\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn experimental_sections_are_declared_on_request_only() {
    let items = "DSV4_API void dsv4_new(void);\n\n".to_owned();
    assert_eq!(guarded("Sessions", items.clone()), items);
    let wanted = "#ifdef DSV4_EXPERIMENTAL\nDSV4_API void dsv4_new(void);\n#endif // DSV4_EXPERIMENTAL\n\n";
    assert_eq!(guarded("Something new (experimental)", items), wanted);
}

#[test]
fn every_exported_function_is_declared_and_described() {
    let header = fs::read_to_string(header_path()).expect("include/dsv4.h is there");
    let mut declared = 0;
    for file in fs::read_dir(root().join("src/ffi")).expect("src/ffi is a folder") {
        let path = file.expect("its entries can be read").path();
        let source = fs::read_to_string(&path).expect("its files are text");
        for (i, _) in source.match_indices("extern \"C\" fn dsv4_") {
            let name = source[i + "extern \"C\" fn ".len()..].split('(').next().unwrap_or_default();
            let at = header.find(&format!(" {name}(")).or_else(|| header.find(&format!("*{name}(")));
            let at = at.unwrap_or_else(|| panic!("{name} is not declared"));
            let block = header[..at].rsplit("\n\n").next().unwrap_or_default();
            assert!(block.starts_with("// "), "{name} has no description: {block}");
            declared += 1;
        }
    }
    assert!(declared > 40, "only {declared} functions were found");
}

/// The whole header.
fn generate() -> String {
    let manual = module_documentation("mod");
    let mut header = String::new();
    header.push_str(&comment(&manual.join("\n")));
    header.push_str(PREAMBLE);
    let version = env!("CARGO_PKG_VERSION");
    let part = |name: &str| env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo sets it");
    let (major, minor, patch) = (part("MAJOR"), part("MINOR"), part("PATCH"));
    for section in SECTIONS {
        let documentation = module_documentation(section);
        let (title, text) = documentation.split_first().expect("a section has a title");
        header.push_str(&banner(title, text));
        if *section == "version" {
            let number = format!("({major}u << 16 | {minor}u << 8 | {patch}u)");
            write!(
                header,
                "// Version of this header.\n#define DSV4_VERSION \"{version}\"\n#define DSV4_VERSION_MAJOR {major}\n\
                 #define DSV4_VERSION_MINOR {minor}\n#define DSV4_VERSION_PATCH {patch}\n\
                 // `DSV4_VERSION` as a number that grows; what dsv4_abi_check takes.\n#define DSV4_VERSION_NUMBER {number}\n\n"
            )
            .expect("a String takes everything");
        }
        header.push_str(&guarded(title, items(section)));
    }
    header.push_str(CLOSING);
    header
}

const PREAMBLE: &str = r#"
// Generated from src/ffi; do not edit.

#ifndef DSV4_H
#define DSV4_H

#include <stddef.h>
#include <stdint.h>

#ifndef DSV4_API
#if defined(_WIN32) && !defined(DSV4_STATIC)
#define DSV4_API __declspec(dllimport)
#else
#define DSV4_API
#endif
#endif

// Warns when a status is thrown away.
#if defined(__GNUC__) || defined(__clang__)
#define DSV4_NODISCARD __attribute__((warn_unused_result))
#else
#define DSV4_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif
"#;

const CLOSING: &str = "#ifdef __cplusplus\n} // extern \"C\"\n#endif\n\n#endif // DSV4_H\n";

/// The `//!` lines at the head of a file of `src/ffi`.
fn module_documentation(file: &str) -> Vec<String> {
    let source = fs::read_to_string(root().join(format!("src/ffi/{file}.rs"))).expect("each section is a file");
    let lines = source.lines().map_while(|line| line.strip_prefix("//!"));
    lines.map(|line| line.strip_prefix(' ').unwrap_or(line).to_owned()).collect()
}

fn comment(text: &str) -> String {
    text.lines().map(|line| format!("// {line}").trim_end().to_owned() + "\n").collect()
}

fn banner(title: &str, text: &[String]) -> String {
    let rule = "/".repeat(100);
    let text = comment(&text.join("\n"));
    let lead = if text.is_empty() { "" } else { text.trim_start_matches("//\n") };
    let lead = if lead.is_empty() { String::new() } else { format!("//\n{lead}") };
    format!("\n{rule}\n// {title}\n{lead}\n")
}

/// What is not frozen yet stands in sections whose titles say so, and programs ask for it: `ctest/abi` leaves it out.
fn guarded(title: &str, items: String) -> String {
    if title.ends_with(" (experimental)") {
        format!("#ifdef DSV4_EXPERIMENTAL\n{}\n#endif // DSV4_EXPERIMENTAL\n\n", items.trim_end())
    } else {
        items
    }
}

/// The declarations of one section, by cbindgen, without what stands once around all of them.
fn items(section: &str) -> String {
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml is valid");
    let file = root().join(format!("src/ffi/{section}.rs"));
    // enums whose numbers travel as int32_t are named by no function of theirs
    let source = fs::read_to_string(&file).expect("each section is a file");
    let enums = source.lines().filter_map(|line| line.strip_prefix("pub enum "));
    config.export.include = enums.map(|rest| rest.trim_end_matches(" {").to_owned()).collect();
    config.export.include.extend(source.contains("pub struct dsv4_error").then(|| "dsv4_error".to_owned()));
    let bindings = cbindgen::Builder::new().with_config(config).with_src(file).generate().expect("src/ffi parses");
    let mut bytes = Vec::new();
    bindings.write(&mut bytes);
    let text = String::from_utf8(bytes).expect("cbindgen writes UTF-8");
    let open = "#ifdef __cplusplus\nextern \"C\" {\n#endif // __cplusplus\n\n";
    let close = "#ifdef __cplusplus\n}  // extern \"C\"\n#endif  // __cplusplus\n";
    assert!(
        !text.contains("extern \"C\"") || (text.contains(open) && text.contains(close)),
        "cbindgen changed: {text}"
    );
    let text = text.replace(open, "").replace(close, "");
    // one attribute line, and one name for a type, whether its section declares it or another
    let text = text
        .replace("DSV4_API\nDSV4_NODISCARD\n", "DSV4_API DSV4_NODISCARD\n")
        .replace("DSV4_API\nvoid", "DSV4_API void");
    let text = text.replace("struct dsv4_", "dsv4_").replace("typedef dsv4_", "typedef struct dsv4_");
    with_initialisers(text.trim_start())
}

/// Puts `dsv4_x_options_init(options)` behind each `dsv4_x_options_init_sized(options, size)`: compiled in the caller,
/// it passes the size that the caller's header has.
fn with_initialisers(text: &str) -> String {
    let mut out = String::new();
    let mut pending = None;
    for line in text.split_inclusive('\n') {
        out.push_str(line);
        if let Some(at) = line.find("_init_sized(") {
            pending = line[..at].rsplit([' ', '*']).next();
        }
        if !line.ends_with(");\n") {
            continue;
        }
        if let Some(name) = pending.take() {
            write!(
                out,
                "\n// Sets `size` and every default in `options`.\nstatic inline void {name}_init({name} *options)\n{{\n    \
                 {name}_init_sized(options, sizeof *options);\n}}\n"
            )
            .expect("a String takes everything");
        }
    }
    assert!(pending.is_none(), "the declaration of {pending:?} has no end");
    out
}
