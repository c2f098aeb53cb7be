//! A bare boot: the same guest under QEMU with nothing of Kibotos around it but what says "configure" and hears "ready".
//!
//! Command line, disks and the configure message come from the daemon's own code, so that they cannot drift apart. What
//! is left out is what a start costs beyond it: the API server, the operator, the session, holder records, events,
//! tap and rules of the network, cgroup, namespaces and another user.

use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail};
use command_fds::CommandFdExt as _;
use jiff::Timestamp;
use kibo_crds::{Bytes, Epoch, Incarnation, InstanceId, NodeId, ObjectUid};
use kibo_guest_protocol::{ENTROPY_LEN, HostConnection, HostEvent, Nonce};
use kibo_node_daemon::{
    accelerator, clock,
    config::Config,
    instance,
    launch::Launch,
    network::{GuestNetwork, Mac},
    pool::{self, TakenObject},
    vmm::{AGENT_SOCKET, Aio, Qemu, SocketDir, Vmm},
};
use kibo_protocol::v1;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

use crate::site::{DISK_MIB, MEMORY_MIB, ROOT_IMAGE, Site};

const READ_BUFFER: usize = 64 * 1024;

/// Boots guests as the node's daemon is configured to.
pub struct Bare {
    vmm: Vmm,
    images: PathBuf,
    directory: PathBuf,
    /// The node gives its guests a network.
    has_network: bool,
    has_io_uring: bool,
}

/// When a boot reached what.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub begun: Timestamp,
    /// The disks are made and QEMU's process was started.
    pub started: Timestamp,
    pub agent: Timestamp,
    pub ready: Timestamp,
}

/// A guest that is ready. It ends when this is dropped.
pub struct Guest {
    pub times: Times,
    pub connection: HostConnection,
    pub stream: UnixStream,
    pub sockets: SocketDir,
    qemu: Child,
    directory: PathBuf,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may be gone already; its directory is below the bench's own.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Bare {
    pub fn new(site: &Site) -> Result<Self> {
        let path = site.daemon_config();
        let text = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
        let config = Config::parse(&text).map_err(|problems| anyhow!("{}: {problems}", path.display()))?;
        let node: NodeId = "bare".parse()?;
        let directory = site.directory("bare");
        let vmm = Vmm::open(config.vmm, node, directory.clone(), PathBuf::new())?;
        let disk_io = accelerator::remembered(&config.state_dir).context("the node has proved nothing")?;
        vmm.use_aio(disk_io);
        let has_network = config.network.is_some();
        Ok(Self { vmm, images: config.images.dir, directory, has_network, has_io_uring: disk_io == Aio::IoUring })
    }

    /// A guest of this host could use it.
    pub fn has_io_uring(&self) -> bool {
        self.has_io_uring
    }

    /// Boots a guest with new disks until it says that it is configured; `change` may add to QEMU's arguments.
    pub async fn boot(&self, volume: bool, change: impl FnOnce(&mut Qemu, &SocketDir) -> Result<()>) -> Result<Guest> {
        self.boot_with(None, volume, change).await
    }

    /// The same from a writable layer of the Template's size, which is taken away from there.
    pub async fn boot_from(&self, layer: &Path) -> Result<Guest> {
        self.boot_with(Some(layer), false, |_, _| Ok(())).await
    }

    async fn boot_with(
        &self,
        layer: Option<&Path>,
        volume: bool,
        change: impl FnOnce(&mut Qemu, &SocketDir) -> Result<()>,
    ) -> Result<Guest> {
        let begun = Timestamp::now();
        let instance = InstanceId::generate();
        let launch = launch(instance, volume)?;
        let directory = self.directory.join(instance.to_string());
        fs::create_dir_all(&directory).with_context(|| format!("failed to make {}", directory.display()))?;
        let sockets = SocketDir::open(&directory)?;
        let machine = instance::machine(&self.images, &launch, disks(&directory, &launch, layer)?);
        let mut qemu = self.vmm.qemu(machine.map_err(|ending| anyhow!(ending.message))?, &sockets)?;
        let network = self.has_network.then(|| network(instance));
        if let Some(network) = &network {
            add_card(&mut qemu, network);
        }
        change(&mut qemu, &sockets)?;
        let qemu = spawn(qemu, &directory)?;
        let mut stream = sockets.connect(AGENT_SOCKET).await?;
        let started = Timestamp::now();
        let mut connection = HostConnection::open(Nonce::new(rand::random()), 0);
        // From here on its end is the end of QEMU too.
        let times = Times { begun, started, agent: started, ready: started };
        let HostEvent::Connected(_) = next(&mut connection, &mut stream).await? else { bail!("it said no hello") };
        let agent = Timestamp::now();
        let configure =
            instance::configuration(&self.images, &launch, network).map_err(|ending| anyhow!(ending.message))?;
        let entropy = rand::random::<[u8; ENTROPY_LEN]>().to_vec();
        connection.send(kibo_guest_protocol::v1::Configure {
            time_unix_nanos: clock::unix_nanos(),
            entropy,
            ..configure
        })?;
        let mut guest = Guest { times: Times { agent, ..times }, connection, stream, sockets, qemu, directory };
        loop {
            if let HostEvent::ConfigureResult(result) = next(&mut guest.connection, &mut guest.stream).await? {
                if let Some(failure) = result.failure {
                    bail!("it could not be configured: {}", failure.message);
                }
                guest.times.ready = Timestamp::now();
                return Ok(guest);
            }
        }
    }
}

/// What the guest says next.
pub async fn next(connection: &mut HostConnection, stream: &mut UnixStream) -> Result<HostEvent> {
    let mut buffer = vec![0; READ_BUFFER];
    let (mut read, mut write) = stream.split();
    loop {
        if let Some(event) = connection.next_event() {
            return Ok(event);
        }
        let outgoing = connection.outgoing();
        tokio::select! {
            len = read.read(&mut buffer) => match len? {
                0 => bail!("QEMU ended"),
                len => connection.receive(&buffer[..len])?,
            },
            len = write.write(outgoing), if !outgoing.is_empty() => {
                let len = len?;
                connection.written(len);
            }
        }
    }
}

/// The disks as a pool makes them, without the records of who may use them; with the layer that there is.
fn disks(directory: &Path, launch: &Launch, mut layer: Option<&Path>) -> Result<Vec<TakenObject>> {
    let disk = |granted: &kibo_node_daemon::launch::GrantedObject| {
        let object = &granted.object;
        let directory = directory.join(object.uid.as_str());
        fs::create_dir(&directory)?;
        // It is the first of them.
        if let Some(layer) = layer.take() {
            let place = directory.join(pool::IMAGE);
            fs::rename(layer, &place).with_context(|| format!("failed to move {} to its place", layer.display()))?;
        }
        pool::ensure_image(&directory, object, Epoch(1))?;
        let image = pool::open_image(&directory, false)?;
        let (uid, pool, epoch, size) = (object.uid.clone(), object.pool.clone(), granted.grant.epoch, object.size);
        Ok(TakenObject { uid, pool, epoch, size, image })
    };
    launch.objects().map(disk).collect()
}

fn spawn(qemu: Qemu, directory: &Path) -> Result<Child> {
    let output = File::create(directory.join("qemu.log"))?;
    let mut command = Command::new(&qemu.program);
    command.args(&qemu.arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
    command.fd_mappings(qemu.files)?;
    command.spawn().with_context(|| format!("failed to start {}", qemu.program.display()))
}

/// What the guest is told of its network, so that it has the same to do as one of the node's.
fn network(instance: InstanceId) -> GuestNetwork {
    GuestNetwork {
        mac: Mac::of(instance),
        address: Ipv4Addr::new(10, 0, 2, 15),
        prefix_length: 24,
        gateway: Some(Ipv4Addr::new(10, 0, 2, 2)),
        dns_servers: Vec::new(),
        mtu: 1500,
    }
}

/// The same network card, with nothing at the other end of its cable: tap and rules are what a start costs beyond.
fn add_card(qemu: &mut Qemu, network: &GuestNetwork) {
    let card = format!("virtio-net-device,netdev=net,mac={}", network.mac);
    let arguments = ["-netdev", "hubport,id=net,hubid=0", "-device", &card];
    qemu.arguments.extend(arguments.map(Into::into));
}

/// As the operator sends it for a Workspace of the Template.
fn launch(instance: InstanceId, volume: bool) -> Result<Launch> {
    let object = || v1::Object {
        uid: uid().to_string(),
        pool: "bare".to_owned(),
        size_bytes: Bytes::mib(DISK_MIB).0,
        must_exist: false,
        grant: Some(v1::Grant { epoch: 1, predecessor_epoch: 0, predecessor_end: v1::PredecessorEnd::None.into() }),
        grows_from_bytes: 0,
    };
    let mount = v1::VolumeMount { object: Some(object()), mount_path: "/data".to_owned() };
    let memory = Bytes::mib(MEMORY_MIB).0;
    let message = v1::Launch {
        instance_id: instance.to_string(),
        workspace: Some(v1::WorkspaceRef::default()),
        cpu_milli: 1000,
        memory_bytes: memory,
        allocated_memory_bytes: memory,
        root_image: ROOT_IMAGE.to_owned(),
        layer: Some(object()),
        volumes: volume.then_some(mount).into_iter().collect(),
        hostname: "bare".to_owned(),
        ..v1::Launch::default()
    };
    Ok(Launch::read(message, "bare".parse()?, Incarnation(1))?)
}

/// In the form of an object's uid.
fn uid() -> ObjectUid {
    let random: u128 = rand::random();
    let hex = format!("{random:032x}");
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-").parse().expect("a uid")
}
