//! `shaders`: the modules that the linker makes, as WGSL or translated by naga.

use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use wgpu_attention::shader::{Link, Target, link};
use wgpu_attention::{Needs, is_named, ops};

use crate::{Global, terminal};

/// List the linked shaders, or show them as WGSL, SPIR-V, MSL or HLSL
#[derive(Args)]
pub struct ShadersArgs {
    /// A name from the list or a part of one; without it, all
    name: Option<String>,
    /// Language to translate to
    #[arg(long, value_enum, default_value = "wgsl")]
    to: Language,
    /// Write each module to a file in this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Language {
    /// As naga and wgpu take it
    Wgsl,
    /// As browsers with Tint take it
    WgslTint,
    /// For Vulkan
    Spirv,
    /// For Metal
    Msl,
    /// For DirectX 12
    Hlsl,
}

impl Language {
    fn ending(self) -> &'static str {
        match self {
            Language::Wgsl | Language::WgslTint => "wgsl",
            Language::Spirv => "spv",
            Language::Msl => "metal",
            Language::Hlsl => "hlsl",
        }
    }
}

/// Every module of every operation.
fn modules() -> Vec<(String, Needs, Link)> {
    ops::links()
}

pub fn run(args: &ShadersArgs, global: &Global) -> Result<()> {
    let mut chosen = modules();
    if let Some(variant) = &global.variant {
        chosen.retain(|(name, ..)| is_named(name, variant));
        ensure!(!chosen.is_empty(), "no module is of the variant `{variant}`; `shaders` lists them");
    }
    if let Some(wanted) = &args.name {
        match chosen.iter().position(|(name, ..)| name == wanted) {
            Some(at) => chosen = vec![chosen.swap_remove(at)],
            None => chosen.retain(|(name, ..)| name.contains(wanted.as_str())),
        }
        ensure!(!chosen.is_empty(), "no module is called `{wanted}`; `shaders` lists them");
    }
    if let Some(folder) = &args.out {
        return write(&chosen, args.to, folder);
    }
    match chosen.as_slice() {
        [(name, _, link)] if args.name.is_some() => {
            if args.to == Language::Spirv && std::io::stdout().is_terminal() {
                bail!("SPIR-V is binary: add --out DIR, or redirect it to a file");
            }
            terminal::print(translate(name, link, args.to)?)
        }
        _ if args.to != Language::Wgsl => {
            bail!("{} modules match; give the name of one, or --out DIR for all", chosen.len())
        }
        _ => terminal::print(list(&chosen)),
    }
}

fn list(modules: &[(String, Needs, Link)]) -> String {
    let mut text = String::new();
    for (name, needs, link) in modules {
        let needs = match needs.subgroup_min {
            0 => String::new(),
            lanes => format!("  subgroups of {lanes}"),
        };
        text += &format!("{name}  shaders/{}.wgsl{needs}\n", link.file);
    }
    text
}

fn write(modules: &[(String, Needs, Link)], language: Language, folder: &Path) -> Result<()> {
    let files: Vec<_> = modules
        .iter()
        .map(|(name, _, link)| Ok((file_name(name, language), translate(name, link, language)?)))
        .collect::<Result<_>>()?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for (name, bytes) in &files {
        let path = folder.join(name);
        let mut file = tempfile::Builder::new();
        #[cfg(unix)]
        file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = file.tempfile_in(folder).with_context(|| format!("cannot write to {}", folder.display()))?;
        file.write_all(bytes).with_context(|| format!("cannot write {}", path.display()))?;
        file.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    terminal::print(format!("wrote {} files to {}\n", files.len(), folder.display()))
}

fn file_name(module: &str, language: Language) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c.to_ascii_lowercase() } else { '.' };
    let name: String = module.chars().map(plain).collect();
    format!("{}.{}", name.split('.').filter(|piece| !piece.is_empty()).collect::<Vec<_>>().join("."), language.ending())
}

fn translate(name: &str, module: &Link, language: Language) -> Result<Vec<u8>> {
    let target = if language == Language::WgslTint { Target::Tint } else { Target::Naga };
    let text = link(module, target)?.text;
    if matches!(language, Language::Wgsl | Language::WgslTint) {
        return Ok(text.into_bytes());
    }
    let wrong = |error: &dyn std::fmt::Display| anyhow!("{name}: naga says {error}");
    let module = naga::front::wgsl::parse_str(&text).map_err(|error| wrong(&error.emit_to_string(&text)))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| wrong(&error.emit_to_string(&text)))?;
    match language {
        Language::Spirv => spirv(&module, &info).map_err(|error| wrong(&error)),
        Language::Msl => msl(&module, &info).map(String::into_bytes).map_err(|error| wrong(&error)),
        _ => hlsl(&module, &info).map(String::into_bytes).map_err(|error| wrong(&error)),
    }
}

fn spirv(module: &naga::Module, info: &ModuleInfo) -> Result<Vec<u8>, naga::back::spv::Error> {
    use naga::back::spv;
    let options = spv::Options { lang_version: (1, 3), ..spv::Options::default() };
    let words = spv::write_vec(module, info, &options, None)?;
    Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
}

fn msl(module: &naga::Module, info: &ModuleInfo) -> Result<String> {
    use naga::back::msl;
    let options = msl::Options { lang_version: (2, 4), ..msl::Options::default() };
    let (text, translated) = msl::write_string(module, info, &options, &msl::PipelineOptions::default())?;
    match translated.entry_point_names.into_iter().find_map(|name| name.err()) {
        Some(error) => bail!(error),
        None => Ok(text),
    }
}

fn hlsl(module: &naga::Module, info: &ModuleInfo) -> Result<String, naga::back::hlsl::Error> {
    use naga::back::hlsl;
    let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_0, ..hlsl::Options::default() };
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default()).write(module, info, None)?;
    Ok(text)
}
