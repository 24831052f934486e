//! Connections through plain libc calls.

use std::io;
use std::path::Path;

/// A connection in both directions, with blocking calls.
pub trait Link {
    /// Sends all of `message`.
    fn send(&mut self, message: &[u8]) -> io::Result<()>;
    /// Receives what is there, at least one byte; 0 is the end.
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Ends the stream to the peer.
    fn finish(&mut self) -> io::Result<()>;

    /// Fills `buffer`. False at the end of the stream.
    #[inline]
    fn recv_all(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut got = 0;
        while got < buffer.len() {
            match self.recv(&mut buffer[got..])? {
                0 if got == 0 => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => got += n,
            }
        }
        Ok(true)
    }
}

/// A connected stream socket; closed when dropped.
pub struct Socket(libc::c_int);

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn ipv4(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    }
}

fn local(path: &Path) -> io::Result<libc::sockaddr_un> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}

/// Pointer and length of an address, as the socket calls take them.
fn raw<T>(address: &T) -> (*const libc::sockaddr, libc::socklen_t) {
    ((address as *const T).cast(), size_of::<T>() as libc::socklen_t)
}

impl Socket {
    fn new(family: libc::c_int) -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        Ok(Socket(check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?))
    }

    /// `to`: a port of 127.0.0.1, or the path of a Unix socket.
    pub fn connect(unix: bool, to: &str) -> io::Result<Self> {
        if unix {
            let socket = Socket::new(libc::AF_UNIX)?;
            let address = local(Path::new(to))?;
            let (at, len) = raw(&address);
            // SAFETY: `address` lives through the call.
            check(unsafe { libc::connect(socket.0, at, len) })?;
            Ok(socket)
        } else {
            let port = to.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            Socket::connect_port(port)
        }
    }

    pub fn connect_port(port: u16) -> io::Result<Self> {
        let socket = Socket::new(libc::AF_INET)?;
        let address = ipv4(port);
        let (at, len) = raw(&address);
        // SAFETY: `address` lives through the call.
        check(unsafe { libc::connect(socket.0, at, len) })?;
        Ok(socket)
    }

    /// Lets small messages leave at once (ping-pong programs set this). One-way measurements do not use the option,
    /// because stock is fastest without it.
    pub fn no_delay(&self) {
        let one: libc::c_int = 1;
        let (at, len) = (&raw const one, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: `one` lives through the call. (A Unix socket refuses the option, which does not matter.)
        unsafe { libc::setsockopt(self.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, at.cast(), len) };
    }
}

impl Socket {
    /// The socket's flags, by `fcntl`.
    #[inline]
    pub fn flags(&self) -> io::Result<libc::c_int> {
        // SAFETY: the call takes no pointers.
        check(unsafe { libc::fcntl(self.0, libc::F_GETFL) })
    }

    /// Makes `number` another descriptor of the connection.
    pub fn place(&self, number: libc::c_int) -> io::Result<()> {
        // SAFETY: the call takes no pointers.
        check(unsafe { libc::dup2(self.0, number) }).map(drop)
    }

    /// Makes a TCP socket and closes it.
    pub fn open() -> io::Result<()> {
        Socket::new(libc::AF_INET).map(drop)
    }

    /// The same descriptor for another thread, which does not close it.
    ///
    /// # Safety
    /// `self` lives longer than the returned value.
    pub unsafe fn again(&self) -> std::mem::ManuallyDrop<Socket> {
        std::mem::ManuallyDrop::new(Socket(self.0))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's own.
        unsafe { libc::close(self.0) };
    }
}

impl Link for Socket {
    #[inline]
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < message.len() {
            let rest = &message[done..];
            // SAFETY: `rest` is readable for its length.
            let n = unsafe { libc::send(self.0, rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) };
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            done += n as usize;
        }
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `buffer` is writable for its length.
        let n = unsafe { libc::recv(self.0, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(n as usize)
    }

    fn finish(&mut self) -> io::Result<()> {
        // SAFETY: the call takes no pointers.
        check(unsafe { libc::shutdown(self.0, libc::SHUT_WR) }).map(drop)
    }
}

/// A listening socket.
pub struct Listener {
    socket: Socket,
    /// Port or path for the client.
    pub address: String,
}

impl Listener {
    /// Listens on a free port of 127.0.0.1.
    pub fn tcp() -> io::Result<Self> {
        let socket = Socket::new(libc::AF_INET)?;
        let mut address = ipv4(0);
        let (at, mut len) = raw(&address);
        // SAFETY: `address` and `len` live through the calls and have the given sizes.
        unsafe {
            check(libc::bind(socket.0, at, len))?;
            check(libc::listen(socket.0, 1024))?;
            check(libc::getsockname(socket.0, (&raw mut address).cast(), &mut len))?;
        }
        let port = u16::from_be(address.sin_port);
        Ok(Listener { socket, address: port.to_string() })
    }

    /// Listens at `path`.
    pub fn unix(path: &Path) -> io::Result<Self> {
        let socket = Socket::new(libc::AF_UNIX)?;
        let address = local(path)?;
        let (at, len) = raw(&address);
        // SAFETY: `address` lives through the calls.
        unsafe {
            check(libc::bind(socket.0, at, len))?;
            check(libc::listen(socket.0, 1024))?;
        }
        Ok(Listener { socket, address: path.display().to_string() })
    }

    pub fn accept(&self) -> io::Result<Socket> {
        let (no_address, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: null pointers are allowed; they mean that the peer's address is not wanted.
        Ok(Socket(check(unsafe { libc::accept4(self.socket.0, no_address, no_len, libc::SOCK_CLOEXEC) })?))
    }
}
