//! Variant rows, and compiled pipelines.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;

use crate::caps::{Caps, Needs};
use crate::error::{Error, Result};
use crate::shader::{self, Binding, BindingKind, Link, Linked, Target};

/// One way to run an operation on shapes described by `D`. An operation lists its rows best first; the last ones need
/// nothing and run on any adapter.
#[derive(Debug)]
pub struct Variant<D: 'static> {
    /// Operation, form, reduction, tile: `attention.tall.subgroup8.q64k32`.
    pub name: &'static str,
    /// What the device must have.
    pub needs: Needs,
    /// Parts to swap, see [`crate::shader`].
    pub swaps: &'static [(&'static str, &'static str)],
    /// Constants to set.
    pub values: &'static [(&'static str, u32)],
    /// Whether it serves this descriptor.
    pub suits: fn(&D) -> bool,
    /// Rows with a lower rank are tried first; among equals the order of the table decides.
    pub rank: fn(&Caps) -> u32,
}

impl<D> Clone for Variant<D> {
    fn clone(&self) -> Self {
        Variant {
            name: self.name,
            needs: self.needs,
            swaps: self.swaps,
            values: self.values,
            suits: self.suits,
            rank: self.rank,
        }
    }
}

impl<D> Variant<D> {
    /// The constant `name` of this row.
    pub fn value(&self, name: &str) -> u32 {
        self.values.iter().find(|(key, _)| *key == name).map_or(0, |(_, value)| *value)
    }

    /// Whether it runs on every adapter at WebGPU's default limits.
    pub fn is_portable(&self) -> bool {
        self.needs == Needs::NONE
    }
}

/// Whether `wanted` names `row`: in full, or by neighbouring pieces of it between dots (`portable`, `tall.subgroup8`).
pub fn is_named(row: &str, wanted: &str) -> bool {
    !wanted.is_empty() && format!(".{row}.").contains(&format!(".{wanted}."))
}

/// A compiled kernel.
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    bindings: Vec<Binding>,
    label: String,
}

impl Pipeline {
    /// A bind group of the resources this kernel names; `find` gives each by name.
    pub(crate) fn bind<'a>(
        &self,
        device: &wgpu::Device,
        find: impl Fn(&str) -> Option<wgpu::BufferBinding<'a>>,
    ) -> Result<wgpu::BindGroup> {
        let mut entries = Vec::with_capacity(self.bindings.len());
        for binding in &self.bindings {
            let resource = find(&binding.name)
                .ok_or_else(|| Error::Gpu(format!("{}: nothing to bind as `{}`", self.label, binding.name)))?;
            entries.push(wgpu::BindGroupEntry {
                binding: binding.number,
                resource: wgpu::BindingResource::Buffer(resource),
            });
        }
        Ok(device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(&self.label),
            layout: &self.layout,
            entries: &entries,
        }))
    }
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.label)
    }
}

/// Pipelines by what they were linked from.
#[derive(Debug, Default)]
pub(crate) struct Pipelines {
    made: Mutex<HashMap<Link, Arc<Pipeline>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pipelines {
    pub(crate) fn count(&self) -> usize {
        lock(&self.made).len()
    }

    /// The pipeline of `link`, compiled now if it was not before. Shader and driver errors come back with file and line
    /// natively; in a browser compilation goes on in the background and its errors are the device's uncaptured errors.
    pub(crate) fn get(
        &self,
        device: &wgpu::Device,
        caps: &Caps,
        cache: Option<&wgpu::PipelineCache>,
        label: &str,
        link: &Link,
    ) -> Result<Arc<Pipeline>> {
        if let Some(pipeline) = lock(&self.made).get(link) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(compile(device, caps, cache, label, link)?);
        lock(&self.made).insert(link.clone(), pipeline.clone());
        Ok(pipeline)
    }
}

/// The dialect that this build's wgpu compiles.
pub(crate) const TARGET: Target = if cfg!(target_arch = "wasm32") { Target::Tint } else { Target::Naga };

fn compile(
    device: &wgpu::Device,
    caps: &Caps,
    cache: Option<&wgpu::PipelineCache>,
    label: &str,
    link: &Link,
) -> Result<Pipeline> {
    let linked = shader::link(link, TARGET)?;
    caps.check_module(label, &linked)?;
    let entries: Vec<_> = linked
        .bindings
        .iter()
        .map(|binding| wgpu::BindGroupLayoutEntry {
            binding: binding.number,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: match binding.kind {
                    BindingKind::Uniform => wgpu::BufferBindingType::Uniform,
                    BindingKind::Read => wgpu::BufferBindingType::Storage { read_only: true },
                    BindingKind::ReadWrite => wgpu::BufferBindingType::Storage { read_only: false },
                },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();

    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(label),
        source: wgpu::ShaderSource::Wgsl(linked.text.as_str().into()),
    };
    // SAFETY: only our own shaders come here, and the host has checked every length, offset and index that they trust
    // before anything is dispatched (see `ops`), so no access is out of bounds and every loop is finite.
    let module = unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) };
    let layout =
        device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries });
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(label),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(label),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false, // every kernel writes before it reads
            ..Default::default()
        },
        cache,
    });
    if let Some(Some(error)) = scope.pop().now_or_never() {
        return Err(located(label, &linked, &module, error));
    }
    Ok(Pipeline { pipeline, layout, bindings: linked.bindings, label: label.to_string() })
}

fn located(label: &str, linked: &Linked, module: &wgpu::ShaderModule, error: wgpu::Error) -> Error {
    let messages = module.get_compilation_info().now_or_never().map(|info| info.messages).unwrap_or_default();
    for message in messages {
        let line = message.location.map_or(0, |location| location.line_number as usize);
        if let Some((file, number)) = linked.lines.get(line.wrapping_sub(1)) {
            return Error::Shader {
                variant: label.into(),
                file: format!("shaders/{file}.wgsl"),
                line: *number,
                message: message.message,
            };
        }
    }
    match error {
        wgpu::Error::Validation { description, .. } => {
            Error::Shader { variant: label.into(), file: "(pipeline)".into(), line: 0, message: description }
        }
        other => other.into(),
    }
}
