//! Every module that the rows can make, without an adapter: it links, naga accepts it with nothing but what the row says
//! it needs, naga's SPIR-V, MSL and HLSL writers translate it, Tint accepts it as a browser would get it, Rust's structs
//! match its layouts, and no file is forgotten.

use std::collections::BTreeSet;

use naga::valid::{Capabilities, ValidationFlags, Validator};
use wgpu_attention::shader::{self, Link, Linked, Target};
use wgpu_attention::{Needs, cache, ops};

fn modules() -> Vec<(String, Needs, Link)> {
    let probe = |file: &'static str, needs| {
        (file.to_string(), needs, Link { file, subgroups: needs != Needs::NONE, ..Link::default() })
    };
    let mut all = vec![probe("probe", Needs::NONE), probe("probe_subgroup", Needs::subgroup(1))];
    all.extend(ops::links());
    all
}

fn validated(name: &str, needs: &Needs, linked: &Linked) -> (naga::Module, naga::valid::ModuleInfo) {
    let module = naga::front::wgsl::parse_str(&linked.text)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&linked.text)));
    // unpack2x16float and its like, which WebGPU demands of every adapter.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if needs.subgroup_min > 0 {
        capabilities |= Capabilities::SUBGROUP;
    }
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    let info =
        validator.validate(&module).unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(&linked.text)));
    (module, info)
}

#[test]
fn every_module_translates_for_vulkan_metal_and_direct3d() {
    let modules = modules();
    assert!(modules.len() > 40, "{}", modules.len());
    for (name, needs, link) in modules {
        let linked = shader::link(&link, Target::Naga).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (module, info) = validated(&name, &needs, &linked);

        let words = naga::back::spv::write_vec(&module, &info, &naga::back::spv::Options::default(), None)
            .unwrap_or_else(|error| panic!("{name}: SPIR-V: {error}"));
        assert_eq!(words[0], 0x0723_0203, "{name}");

        // Subgroup operations came with MSL 2.1 and shader model 6.0.
        let msl = naga::back::msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
        let (text, _) = naga::back::msl::write_string(&module, &info, &msl, &Default::default())
            .unwrap_or_else(|error| panic!("{name}: MSL: {error}"));
        assert!(text.contains("kernel void"), "{name}");

        let hlsl = naga::back::hlsl::Options {
            shader_model: naga::back::hlsl::ShaderModel::V6_0,
            fake_missing_bindings: true,
            ..Default::default()
        };
        let mut text = String::new();
        naga::back::hlsl::Writer::new(&mut text, &hlsl, &Default::default())
            .write(&module, &info, None)
            .unwrap_or_else(|error| panic!("{name}: HLSL: {error}"));
        assert!(text.contains("numthreads"), "{name}");
    }
}

/// Tint, through the script in tests/tint, for every module as a browser gets it.
#[test]
fn every_module_compiles_with_tint() {
    let tint = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tint");
    if !tint.join("node_modules/webgpu").exists() {
        let required = std::env::var("WGPU_ATTENTION_REQUIRE_TINT").is_ok_and(|value| value == "1");
        assert!(!required, "WGPU_ATTENTION_REQUIRE_TINT=1, but `npm install` has not run in tests/tint");
        println!("SKIPPED: Tint; run `npm install` in tests/tint (./dev test does)");
        return;
    }
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("tint");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let modules = modules();
    for (name, _, link) in &modules {
        let linked = shader::link(link, Target::Tint).unwrap();
        std::fs::write(folder.join(format!("{}.wgsl", name.replace([' ', '(', ')'], "-"))), linked.text).unwrap();
    }
    let output = std::process::Command::new("node").arg(tint.join("check.mjs")).arg(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(&format!("{} modules, 0 errors", modules.len())), "{text}");
}

/// The sizes that wgpu does not check, and which we take from the text, are what naga computes; every row that needs
/// nothing fits WebGPU's default limits.
#[test]
fn workgroup_memory_is_summed_right() {
    for (name, needs, link) in modules() {
        let linked = shader::link(&link, Target::Naga).unwrap();
        let (module, _) = validated(&name, &needs, &linked);
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let bytes: u32 = module
            .global_variables
            .iter()
            .filter(|(_, variable)| variable.space == naga::AddressSpace::WorkGroup)
            .map(|(_, variable)| layouter[variable.ty].size)
            .sum();
        assert_eq!(linked.workgroup_bytes, bytes, "{name}");
        let workgroup = module.entry_points[0].workgroup_size.iter().product::<u32>();
        assert_eq!(linked.constants.get("WORKGROUP").copied().unwrap_or(workgroup), workgroup, "{name}");
        let storage = linked.bindings.iter().filter(|b| b.kind != shader::BindingKind::Uniform).count();
        let default = bytes <= 16 << 10 && workgroup <= 256;
        assert!((default || needs != Needs::NONE) && storage <= 8, "{name}: {bytes} bytes, {workgroup}, {storage}");
    }
}

#[test]
fn structs_match_their_wgsl() {
    for (file, name, rust) in
        [ops::attention::STRUCTS, ops::merge::STRUCTS, ops::runs::STRUCTS, ops::unfused::STRUCTS, cache::STRUCTS]
            .concat()
    {
        let text = shader::FILES.iter().find(|(path, _)| *path == file).unwrap().1;
        let body = text.split(&format!("struct {name} {{\n")).nth(1).unwrap().split("\n}").next().unwrap();
        let fields = body.lines().map(|line| line.trim().split_once(": ").unwrap());
        let names: Vec<&str> = fields.clone().map(|(field, _)| field).collect();
        assert_eq!(names, rust, "{file}: {name}");
        // Only 4-byte members, so that equal names in equal order mean equal layout.
        let plain = |kind: &str| ["f32,", "u32,", "i32,"].iter().any(|plain| kind.starts_with(plain));
        assert!(fields.clone().all(|(_, kind)| plain(kind)), "{file}: {name}");
    }
}

#[test]
fn every_wgsl_file_is_listed_and_clean() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
    let mut on_disk = BTreeSet::new();
    for (folder, prefix) in [(root.clone(), ""), (root.join("parts"), "parts/")] {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "wgsl") {
                on_disk.insert(format!("{prefix}{}", path.file_stem().unwrap().to_str().unwrap()));
            }
        }
    }
    let listed: BTreeSet<String> = shader::FILES.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(on_disk, listed);
    for (name, text) in shader::FILES {
        let enables = text.lines().any(|line| line.starts_with("enable ") || line.starts_with("requires "));
        assert!(!enables, "{name}: the preamble is the linker's");
        assert!(text.starts_with("//"), "{name}: says what it is");
        assert!(!text.contains('\t') && text.ends_with('\n'), "{name}");
    }
}
