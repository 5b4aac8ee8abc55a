//! What an adapter can do, as far as kernels care.

use crate::error::{Error, Result};
use crate::shader::{BindingKind, Linked};

/// Capabilities of a device: what it was requested with, and what was measured on it.
#[derive(Clone, Debug)]
pub struct Caps {
    /// Enabled features of the device, not all that the adapter has.
    pub features: wgpu::Features,
    /// Limits of the device.
    pub limits: wgpu::Limits,
    /// Name, driver and type of the adapter.
    pub info: wgpu::AdapterInfo,
    /// Smallest and largest subgroup size a kernel may meet, if subgroup operations are enabled.
    pub subgroup: Option<(u32, u32)>,
    /// The size that a probe dispatch saw.
    pub subgroup_seen: Option<u32>,
    /// Shapes of cooperative matrices, if the adapter was at hand.
    pub cooperative_matrix: Vec<wgpu::CooperativeMatrixProperties>,
    /// Iterations after which a loop silently stops (some software adapters: about 65,535); none if loops run on.
    pub loop_limit: Option<u32>,
    /// Whether NaN survives arithmetic and comparisons, which WGSL does not promise.
    pub keeps_nan: bool,
}

/// A lesser adapter to pretend, for tests: what is set here is taken away.
#[derive(Clone, Debug, Default)]
pub struct CapsMask {
    /// Features to take away.
    pub without: wgpu::Features,
    /// Pretend at most this much workgroup memory.
    pub workgroup_bytes: Option<u32>,
    /// Pretend at most this many invocations a workgroup.
    pub invocations: Option<u32>,
    /// Pretend these subgroup sizes.
    pub subgroup: Option<(u32, u32)>,
    /// Pretend that at most so many bytes can be bound as one storage buffer.
    pub binding_bytes: Option<u64>,
    /// Pretend that loops stop after so many iterations.
    pub loop_limit: Option<u32>,
}

/// What a variant needs of a device beyond WebGPU's default limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Enabled features.
    pub features: wgpu::Features,
    /// Every subgroup has at least so many lanes.
    pub subgroup_min: u32,
}

impl Needs {
    /// Nothing: runs on any adapter.
    pub const NONE: Needs = Needs { features: wgpu::Features::empty(), subgroup_min: 0 };

    /// Subgroup operations, with subgroups of at least `lanes`.
    pub const fn subgroup(lanes: u32) -> Needs {
        Needs { features: wgpu::Features::SUBGROUP, subgroup_min: lanes }
    }
}

impl Caps {
    /// What the device itself says, without running anything on it.
    pub fn of(device: &wgpu::Device) -> Self {
        let (features, limits, info) = (device.features(), device.limits(), device.adapter_info());
        let subgroup = features
            .contains(wgpu::Features::SUBGROUP)
            .then_some((info.subgroup_min_size.max(1), info.subgroup_max_size.max(info.subgroup_min_size)));
        Caps {
            features,
            limits,
            info,
            subgroup,
            subgroup_seen: None,
            cooperative_matrix: Vec::new(),
            loop_limit: None,
            keeps_nan: true,
        }
    }

    pub(crate) fn masked(mut self, mask: &CapsMask) -> Self {
        self.features = self.features - mask.without;
        let limit = &mut self.limits.max_compute_workgroup_storage_size;
        *limit = mask.workgroup_bytes.unwrap_or(*limit).min(*limit);
        let limit = &mut self.limits.max_compute_invocations_per_workgroup;
        *limit = mask.invocations.unwrap_or(*limit).min(*limit);
        let limit = &mut self.limits.max_storage_buffer_binding_size;
        *limit = mask.binding_bytes.unwrap_or(*limit).min(*limit);
        if !self.features.contains(wgpu::Features::SUBGROUP) {
            self.subgroup = None;
        } else if mask.subgroup.is_some() {
            self.subgroup = mask.subgroup;
        }
        self.loop_limit = mask.loop_limit.or(self.loop_limit);
        self
    }

    /// `Ok` if the device has what `needs` names, otherwise the first thing it lacks.
    pub fn has(&self, needs: &Needs) -> std::result::Result<(), String> {
        if !self.features.contains(needs.features) {
            return Err(format!("the device was made without {:?}", needs.features - self.features));
        }
        match self.subgroup {
            Some((min, _)) if min < needs.subgroup_min => {
                Err(format!("subgroups can be as small as {min}, it needs {}", needs.subgroup_min))
            }
            None if needs.subgroup_min > 0 => Err("no subgroup operations".into()),
            _ => Ok(()),
        }
    }

    /// Workgroups that keep the device busy at once: a guess by the kind of device, since WebGPU does not tell.
    pub fn resident_workgroups(&self) -> u32 {
        match self.info.device_type {
            wgpu::DeviceType::Cpu => 16,
            wgpu::DeviceType::IntegratedGpu => 128,
            _ => 512,
        }
    }

    /// WebGPU guarantees these on every adapter; a native device can be requested with less.
    pub(crate) fn check_minimum(&self) -> Result<()> {
        let limits = &self.limits;
        for (what, least, given) in [
            ("max_compute_workgroups_per_dimension", 65_535, limits.max_compute_workgroups_per_dimension.into()),
            ("max_uniform_buffer_binding_size", 16 << 10, limits.max_uniform_buffer_binding_size),
            ("max_uniform_buffers_per_shader_stage", 3, limits.max_uniform_buffers_per_shader_stage.into()),
        ] {
            if given < least {
                return Err(Error::unsupported("this device", format!("{what} is {given}, WebGPU's least is {least}")));
            }
        }
        Ok(())
    }

    /// Storage buffers, bytes of workgroup memory and invocations of a module against the limits; wgpu does not check the second.
    pub(crate) fn check_module(&self, what: &str, linked: &Linked) -> Result<()> {
        let bytes = linked.workgroup_bytes;
        let invocations = linked.constants.get("WORKGROUP").copied().unwrap_or(1);
        let buffers = linked.bindings.iter().filter(|binding| binding.kind != BindingKind::Uniform).count() as u32;
        let max_buffers = self.limits.max_storage_buffers_per_shader_stage;
        if buffers > max_buffers {
            let hint = "request the device with the adapter's limits, or leave options out";
            let what = format!("storage buffers of {what}");
            return Err(Error::limit(what, max_buffers.into(), buffers.into(), hint));
        }
        let (max_bytes, max_invocations) =
            (self.limits.max_compute_workgroup_storage_size, self.limits.max_compute_invocations_per_workgroup);
        if bytes > max_bytes {
            let hint = "choose another variant, or request the device with the adapter's limits";
            return Err(Error::limit(format!("workgroup memory of {what}"), max_bytes.into(), bytes.into(), hint));
        }
        if invocations > max_invocations {
            let hint = "choose another variant, or request the device with the adapter's limits";
            let what = format!("invocations a workgroup of {what}");
            return Err(Error::limit(what, max_invocations.into(), invocations.into(), hint));
        }
        Ok(())
    }
}
