//! The table of WGSL files and the linker that makes one module out of them.
//!
//! A shader is a whole file that a person can read and an editor understands; nothing is built from strings. The linker
//!
//! 1. follows `import package::parts::reduce::team_max;` and brings the part `parts/reduce.wgsl` in, once;
//! 2. follows `@binding(4) import package::parts::load_f32 as q;` and makes an *instance* of the part: its names get the
//!    prefix `q_`, its constant `BINDING` becomes 4, and `q::load4(…)` in the importing file means this instance
//!    (WGSL has no overloading, and q, k and v differ in type);
//! 3. replaces a part by a twin with the same functions (a *swap*): `("reduce", "reduce_subgroup")` everywhere, or
//!    `("q=load_f32", "load_f16")` for one instance;
//! 4. rewrites the right-hand side of a named `const` (a *value*); naming one that does not exist is an error;
//! 5. writes the preamble (`enable …`) for the target, since naga and Tint disagree on it;
//! 6. remembers file and line of every output line, so that compile errors name the source.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Every WGSL file: name without ending, relative to `shaders/`, and text.
        pub const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../shaders/", $name, ".wgsl")))),*];
    };
}

files!(
    "append",
    "attention",
    "attention_decode",
    "gather",
    "merge",
    "page_copy",
    "parts/bf16",
    "parts/bias",
    "parts/bias_none",
    "parts/dest_out",
    "parts/dest_partial",
    "parts/exp",
    "parts/f16",
    "parts/finish",
    "parts/kv_dense",
    "parts/kv_paged",
    "parts/load_bf16",
    "parts/load_bf16_eights",
    "parts/load_bf16_scalar",
    "parts/load_f16",
    "parts/load_f16_eights",
    "parts/load_f16_scalar",
    "parts/load_f32",
    "parts/load_f32_scalar",
    "parts/lse",
    "parts/lse_none",
    "parts/mask_bits",
    "parts/mask_bool",
    "parts/mask_none",
    "parts/params",
    "parts/plan",
    "parts/reduce",
    "parts/reduce_subgroup",
    "parts/runs",
    "parts/states_partial",
    "parts/states_user",
    "parts/store_bf16",
    "parts/store_bf16_scalar",
    "parts/store_f16",
    "parts/store_f16_scalar",
    "parts/store_f32",
    "parts/store_f32_scalar",
    "parts/strides",
    "parts/tanh",
    "parts/team",
    "parts/team_subgroup",
    "parts/tile64",
    "parts/unfused",
    "parts/unit16",
    "parts/unit2",
    "parts/unit4",
    "probe",
    "probe_subgroup",
    "unfused_output",
    "unfused_scores",
    "unfused_softmax",
);

/// A struct that a shader reads: 4-byte fields in the order of the WGSL, and their names for the test that compares both.
macro_rules! shader_struct {
    ($(#[$meta:meta])* $visibility:vis struct $name:ident { $($field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
        $visibility struct $name { $(pub(super) $field: $kind,)* }

        impl $name {
            pub(super) const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    };
}
pub(crate) use shader_struct;

/// Who compiles the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// naga, natively: no `enable subgroups`.
    Naga,
    /// Tint, in a browser.
    Tint,
}

/// How a binding is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindingKind {
    /// `var<uniform>`
    Uniform,
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    ReadWrite,
}

/// One `@group(0) @binding(…)` variable of a linked module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Its number.
    pub number: u32,
    /// Its name in the linked text; an instance's `data` is `q_data`.
    pub name: String,
    /// How it is bound.
    pub kind: BindingKind,
}

/// A module ready to compile.
#[derive(Clone, Debug)]
pub struct Linked {
    /// The WGSL.
    pub text: String,
    /// Per line of `text`: file and line (from 1) in `shaders/`.
    pub lines: Vec<(&'static str, u32)>,
    /// Its bindings, by number.
    pub bindings: Vec<Binding>,
    /// The final value of every `const` of type u32.
    pub constants: BTreeMap<String, u32>,
    /// Bytes of its workgroup variables. wgpu does not check this against the device; we do.
    pub workgroup_bytes: u32,
}

/// What to link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Link {
    /// The main file.
    pub file: &'static str,
    /// Part → twin, or instance=part → twin.
    pub swaps: Vec<(String, String)>,
    /// Constant → value.
    pub values: Vec<(String, u32)>,
    /// Whether it uses subgroup operations.
    pub subgroups: bool,
}

fn text_of(name: &str) -> Result<(&'static str, &'static str)> {
    let found = FILES.iter().find(|(file, _)| *file == name);
    found.copied().ok_or_else(|| link_error(name, 0, "no such WGSL file"))
}

fn link_error(file: &str, line: u32, message: impl Into<String>) -> Error {
    Error::Shader { variant: "linker".into(), file: format!("shaders/{file}.wgsl"), line, message: message.into() }
}

/// Splits code (not comments) into identifiers and everything else.
fn tokens(line: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let end = match rest.find(|c: char| is_word(c) != is_word(first)) {
            Some(end) => end,
            None => rest.len(),
        };
        out.push(&rest[..end]);
        rest = &rest[end..];
    }
    out
}

/// The name a top-level line declares, if it declares one.
fn declared(line: &str) -> Option<&str> {
    if line.starts_with([' ', '\t', '}', '/']) {
        return None;
    }
    let mut words = line.split([' ', ':', '(', '=', ';', '{']).filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        if word == "fn" || word == "const" || word == "struct" || word == "alias" {
            return words.next();
        }
        if word.starts_with("var") {
            let rest = &line[line.find('>')? + 1..];
            return rest.trim_start().split(':').next().map(str::trim);
        }
    }
    None
}

struct Import<'a> {
    part: &'a str,
    instance: Option<&'a str>,
    binding: Option<&'a str>,
}

fn parse_import(line: &str) -> Option<Import<'_>> {
    let (binding, rest) = match line.strip_prefix("@binding(") {
        Some(rest) => {
            let (number, rest) = rest.split_once(") ")?;
            (Some(number), rest)
        }
        None => (None, line),
    };
    let path = rest.strip_prefix("import package::parts::")?.split(';').next()?;
    let (path, instance) = match path.split_once(" as ") {
        Some((path, instance)) => (path, Some(instance)),
        None => (path, None),
    };
    Some(Import { part: path.split("::").next()?, instance, binding })
}

struct Linker<'a> {
    link: &'a Link,
    done: BTreeSet<String>,
    used_swaps: BTreeSet<usize>,
    used_values: BTreeSet<usize>,
    lines: Vec<(String, &'static str, u32)>,
}

impl Linker<'_> {
    fn swap(&mut self, part: &str, instance: Option<&str>) -> String {
        let specific = instance.map(|instance| format!("{instance}={part}"));
        let mut result = part.to_string();
        for (i, (from, to)) in self.link.swaps.iter().enumerate() {
            if Some(from) == specific.as_ref() || (from == part && result == part) {
                self.used_swaps.insert(i);
                result = to.clone();
            }
        }
        result
    }

    fn add(&mut self, name: &str, instance: Option<&str>, binding: Option<&str>) -> Result<()> {
        if !self.done.insert(format!("{} as {}", name, instance.unwrap_or(""))) {
            return Ok(());
        }
        let (file, text) = text_of(name)?;
        let own: BTreeSet<&str> = text.lines().filter_map(declared).collect();
        for (i, line) in text.lines().enumerate() {
            let number = i as u32 + 1;
            if let Some(import) = parse_import(line) {
                let part = self.swap(import.part, import.instance);
                self.add(&format!("parts/{part}"), import.instance, import.binding)?;
                continue;
            }
            let mut line = self.apply_value(line);
            if let (Some(number), Some("BINDING")) = (binding, declared(&line)) {
                line = format!("const BINDING: u32 = {number}u;");
            }
            let line = match instance {
                Some(instance) => prefixed(&line, instance, &own),
                None => line,
            };
            self.lines.push((path_calls(&line), file, number));
        }
        Ok(())
    }

    fn apply_value(&mut self, line: &str) -> String {
        if line.starts_with("const ") {
            let name = declared(line).unwrap_or_default();
            for (i, (constant, value)) in self.link.values.iter().enumerate() {
                if constant == name {
                    self.used_values.insert(i);
                    let (left, _) = line.split_once('=').unwrap_or((line, ""));
                    return format!("{left}= {value}u;");
                }
            }
        }
        line.to_string()
    }
}

/// Gives a part's own names the instance's prefix, except after a dot (members).
fn prefixed(line: &str, instance: &str, own: &BTreeSet<&str>) -> String {
    let (code, comment) = line.split_at(line.find("//").unwrap_or(line.len()));
    let mut out = String::new();
    for token in tokens(code) {
        if own.contains(token) && !out.ends_with('.') {
            out.push_str(instance);
            out.push('_');
        }
        out.push_str(token);
    }
    out + comment
}

/// `q::load4` → `q_load4`.
fn path_calls(line: &str) -> String {
    let (code, comment) = line.split_at(line.find("//").unwrap_or(line.len()));
    code.replace("::", "_") + comment
}

/// Links a module.
pub fn link(link: &Link, target: Target) -> Result<Linked> {
    let mut linker = Linker {
        link,
        done: BTreeSet::new(),
        used_swaps: BTreeSet::new(),
        used_values: BTreeSet::new(),
        lines: Vec::new(),
    };
    linker.add(link.file, None, None)?;
    if let Some(i) = (0..link.values.len()).find(|i| !linker.used_values.contains(i)) {
        return Err(link_error(link.file, 0, format!("no constant `{}` to give a value to", link.values[i].0)));
    }
    if let Some(i) = (0..link.swaps.len()).find(|i| !linker.used_swaps.contains(i)) {
        return Err(link_error(link.file, 0, format!("no part `{}` to swap", link.swaps[i].0)));
    }
    if link.subgroups && target == Target::Tint {
        linker.lines.insert(0, ("enable subgroups;".into(), link.file, 1));
    }
    let mut linked = Linked {
        text: String::new(),
        lines: Vec::new(),
        bindings: Vec::new(),
        constants: BTreeMap::new(),
        workgroup_bytes: 0,
    };
    for (line, file, number) in linker.lines {
        read_constant(&line, &mut linked.constants);
        linked.text.push_str(&line);
        linked.text.push('\n');
        linked.lines.push((file, number));
    }
    for line in linked.text.lines() {
        if let Some(binding) = read_binding(line, &linked.constants) {
            linked.bindings.push(binding);
        }
        if let Some(bytes) = read_workgroup(line, &linked.constants) {
            linked.workgroup_bytes += bytes.map_err(|message| link_error(link.file, 0, message))?;
        }
    }
    linked.bindings.sort_by_key(|binding| binding.number);
    Ok(linked)
}

fn read_constant(line: &str, constants: &mut BTreeMap<String, u32>) {
    let Some(rest) = line.strip_prefix("const ") else { return };
    let Some((left, right)) = rest.split_once('=') else { return };
    let Some((name, kind)) = left.split_once(':') else { return };
    if kind.trim() == "u32"
        && let Some(value) = evaluate(right.split(';').next().unwrap_or_default(), constants)
    {
        constants.insert(name.trim().to_string(), value);
    }
}

/// Constant u32 expressions of `+`, `*`, `/`, `max(a, b)`, left to right with the usual precedence: what the shaders use.
fn evaluate(text: &str, constants: &BTreeMap<String, u32>) -> Option<u32> {
    let text = text.trim();
    if let Some(inside) = text.strip_prefix("max(").and_then(|rest| rest.strip_suffix(')')) {
        let (a, b) = inside.split_once(',')?;
        return Some(evaluate(a, constants)?.max(evaluate(b, constants)?));
    }
    if let Some((a, b)) = text.rsplit_once(" + ") {
        return evaluate(a, constants)?.checked_add(evaluate(b, constants)?);
    }
    match text.rfind([' ']).map(|_| text.rsplit_once(" / ").max(text.rsplit_once(" * "))) {
        Some(Some((a, b))) => {
            let (a_value, b_value) = (evaluate(a, constants)?, evaluate(b, constants)?);
            match text[a.len()..].trim_start().starts_with('*') {
                true => a_value.checked_mul(b_value),
                false => a_value.checked_div(b_value),
            }
        }
        _ => match text.strip_suffix('u').unwrap_or(text).parse() {
            Ok(number) => Some(number),
            Err(_) => constants.get(text).copied(),
        },
    }
}

fn read_binding(line: &str, constants: &BTreeMap<String, u32>) -> Option<Binding> {
    let rest = line.strip_prefix("@group(0) @binding(")?;
    let (number, rest) = rest.split_once(')')?;
    let number = number.parse().ok().or_else(|| constants.get(number).copied())?;
    let kind = match rest.trim_start() {
        rest if rest.starts_with("var<uniform>") => BindingKind::Uniform,
        rest if rest.starts_with("var<storage, read_write>") => BindingKind::ReadWrite,
        _ => BindingKind::Read,
    };
    let name = rest.split('>').nth(1)?.split(':').next()?.trim().to_string();
    Some(Binding { number, name, kind })
}

/// Bytes of `var<workgroup> name: array<vec4<f32>, N>;` and of scalars.
fn read_workgroup(line: &str, constants: &BTreeMap<String, u32>) -> Option<std::result::Result<u32, String>> {
    let rest = line.strip_prefix("var<workgroup> ")?;
    let kind = rest.split_once(':')?.1.split(';').next()?.trim();
    let size_of = |kind: &str| -> Option<u32> {
        match kind {
            "f32" | "u32" | "i32" => Some(4),
            "vec4<f32>" | "vec4<u32>" | "vec4<i32>" => Some(16),
            _ => None,
        }
    };
    let bytes = match kind.strip_prefix("array<").and_then(|inside| inside.strip_suffix('>')) {
        Some(inside) => inside
            .rsplit_once(", ")
            .and_then(|(element, count)| size_of(element)?.checked_mul(evaluate(count, constants)?)),
        None => size_of(kind),
    };
    Some(bytes.ok_or_else(|| format!("cannot tell the size of `{line}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constants() -> BTreeMap<String, u32> {
        [("A".to_string(), 6), ("B".to_string(), 4)].into()
    }

    #[test]
    fn constant_expressions() {
        for (text, value) in [
            ("128u", Some(128)),
            ("A / B", Some(1)),
            ("4u * A", Some(24)),
            ("4u * A / B + 1u", Some(7)),
            ("A + B / 4u + 1u", Some(8)),
            ("max(A * B, B)", Some(24)),
            ("A * A / B * 2u", Some(18)),
            ("A / 0u", None),
            ("unknown", None),
        ] {
            assert_eq!(evaluate(text, &constants()), value, "{text}");
        }
    }

    #[test]
    fn an_instance_gets_its_prefix_everywhere_but_on_members_and_comments() {
        let own = ["data", "load4"].into();
        assert_eq!(prefixed("x.data = data[load4(i)]; // data", "q", &own), "x.data = q_data[q_load4(i)]; // data");
    }

    #[test]
    fn unknown_values_and_swaps_are_errors() {
        let with = |swaps: Vec<(String, String)>, values| Link { file: "merge", swaps, values, subgroups: false };
        assert!(link(&with(vec![], vec![("TILE".into(), 1)]), Target::Naga).is_err());
        assert!(link(&with(vec![("reduce".into(), "reduce_subgroup".into())], vec![]), Target::Naga).is_err());
        assert!(link(&with(vec![("lse_none".into(), "nothing".into())], vec![]), Target::Naga).is_err());
        assert!(link(&with(vec![("lse_none".into(), "lse".into())], vec![]), Target::Naga).is_ok());
    }

    #[test]
    fn lines_name_their_file() {
        let linked = link(&Link { file: "merge", ..Link::default() }, Target::Naga).unwrap();
        let at = linked.text.lines().position(|line| line.starts_with("fn put_lse")).unwrap();
        assert_eq!(linked.lines[at].0, "parts/lse_none");
        assert_eq!(linked.text.lines().count(), linked.lines.len());
    }
}
