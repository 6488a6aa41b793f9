//! NPUs as burn devices.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::ir::BackendIr;
use burn::tensor::Device;
use burn_attention::remote::ServedOps;
use burn_fused::serve::{ServeError, Server};
use burn_remote::server::CustomOpRegistry;
use rope_burn::NormRotaryOps;

use crate::npu::AscendDevice;
use crate::{Ascend, AscendError};

/// The reason why an NPU is not available as a burn device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The NPU or its driver is missing or failed.
    #[error(transparent)]
    Ascend(#[from] AscendError),
    /// Another [`AscendHost`] of this process serves the NPU.
    #[error(
        "{device} is open in this process already; use its host's device, or drop that host first"
    )]
    InUse {
        /// The device.
        device: AscendDevice,
    },
    /// The NPU exists but could not be served.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Returns the custom operations of rope-burn and burn-attention for servers.
pub fn operations<B: BackendIr + NormRotaryOps + ServedOps>() -> CustomOpRegistry<B> {
    let mut operations = CustomOpRegistry::new();
    rope_burn::remote::register(&mut operations);
    burn_attention::remote::register(&mut operations);
    operations
}

/// NPUs of this machine as burn devices, through a server in this process that only this process
/// can use.
///
/// Dropping it ends the server and releases all memory of the devices. Reading a remaining tensor
/// is then an error.
///
/// # Examples
/// ```
/// use burn_ascend::{AscendDevice, AscendHost};
/// // Without CANN the error says what was looked for.
/// match AscendHost::start(&[AscendDevice::new(0)]) {
///     Ok(host) => println!("{:?}", host.devices()),
///     Err(error) => println!("{error}"),
/// }
/// ```
#[derive(Debug)]
pub struct AscendHost {
    npus: Vec<AscendDevice>,
    devices: Vec<Device>,
    server: Option<Server>,
}

/// NPUs that a host of this process serves.
static HOSTED: Mutex<Vec<AscendDevice>> = Mutex::new(Vec::new());
/// Hosts that [`AscendDevice::device`] started.
static KEPT: Mutex<Vec<AscendHost>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AscendHost {
    /// Opens the NPUs and serves them to this process.
    ///
    /// # Errors
    /// [`DeviceError::Ascend`] if an NPU is missing; [`DeviceError::InUse`];
    /// [`DeviceError::Serve`].
    pub fn start(npus: &[AscendDevice]) -> Result<Self, DeviceError> {
        for npu in npus {
            npu.open()?;
        }
        {
            let mut hosted = lock(&HOSTED);
            for (index, npu) in npus.iter().enumerate() {
                if hosted.contains(npu) || npus[..index].contains(npu) {
                    return Err(DeviceError::InUse { device: *npu });
                }
            }
            hosted.extend(npus);
        }
        // From here on its drop removes the NPUs from the list.
        let mut host = Self {
            npus: npus.to_vec(),
            devices: Vec::new(),
            server: None,
        };
        let mut operations = operations();
        // Of this process alone: other clients do not see each other's devices.
        crate::collective::register(&mut operations);
        let server = Server::start::<Ascend>(npus.to_vec(), operations)?;
        let server = host.server.insert(server);
        let devices = (0..npus.len()).map(|index| server.connect(index));
        host.devices = devices.collect::<Result<_, _>>()?;
        Ok(host)
    }

    /// The burn devices, without autodiff, in the order of the NPUs.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The NPUs.
    pub fn npus(&self) -> &[AscendDevice] {
        &self.npus
    }
}

impl Drop for AscendHost {
    fn drop(&mut self) {
        // The sessions end first, since they hold the tensors.
        self.server = None;
        for npu in &self.npus {
            npu.release();
        }
        lock(&HOSTED).retain(|hosted| !self.npus.contains(hosted));
    }
}

impl AscendDevice {
    /// Returns this NPU as a burn device, without autodiff; the same device each time.
    ///
    /// The first call starts a server, which runs until [`close`](Self::close) or the end of the
    /// process.
    ///
    /// # Errors
    /// [`DeviceError::Ascend`] if CANN or the NPU is missing, with the paths tried; those of
    /// [`AscendHost::start`].
    pub fn device(&self) -> Result<Device, DeviceError> {
        let mut kept = lock(&KEPT);
        if let Some(host) = kept.iter().find(|host| host.npus.contains(self)) {
            return Ok(host.devices[0].clone());
        }
        let host = AscendHost::start(&[*self])?;
        let device = host.devices[0].clone();
        kept.push(host);
        Ok(device)
    }

    /// Ends the server of [`device`](Self::device), waits for the NPU's work, releases its cached
    /// memory and closes it. Tensors still alive keep their memory until dropped. The next use
    /// reopens the NPU, as after the loss of a device.
    ///
    /// # Errors
    /// Those of the work still queued; the NPU is closed regardless.
    pub fn close(&self) -> Result<(), AscendError> {
        let host = {
            let mut kept = lock(&KEPT);
            let index = kept.iter().position(|host| host.npus.contains(self));
            index.map(|index| kept.swap_remove(index))
        };
        drop(host);
        self.forget()
    }
}
