//! Descriptors of every wrong kind.

use fsocket_sys as sys;

pub struct Descriptors(Vec<i32>);

impl Descriptors {
    /// One descriptor of each kind, and `own`, a control socket.
    pub fn new(own: i32) -> Descriptors {
        let mut fds = vec![own];
        let mut add = |fd: i32| {
            if fd >= 0 {
                fds.push(fd);
            }
        };
        // SAFETY: system calls with numbers, constant strings and local arrays.
        unsafe {
            let mut two = [-1; 2];
            for path in [c"/etc/passwd", c"/", c"/dev/null", c"/dev/zero", c"/proc/self/mem", c"/dev/tty"] {
                add(libc::open(path.as_ptr(), libc::O_RDONLY));
            }
            for (kind, protocol) in [(libc::SOCK_STREAM, 0), (libc::SOCK_DGRAM, 0), (libc::SOCK_SEQPACKET, 0)] {
                add(libc::socket(libc::AF_UNIX, kind, protocol));
            }
            for family in [libc::AF_INET, libc::AF_INET6] {
                add(libc::socket(family, libc::SOCK_STREAM, 0));
                add(libc::socket(family, libc::SOCK_DGRAM, 0));
                let listener = libc::socket(family, libc::SOCK_STREAM, 0);
                libc::listen(listener, 1);
                // Both ends of a connection.
                let (opened, mut at, mut len) = (libc::socket(family, libc::SOCK_STREAM, 0), [0u64; 16], 128);
                libc::getsockname(listener, at.as_mut_ptr().cast(), &raw mut len);
                libc::connect(opened, at.as_ptr().cast(), len);
                let flags = libc::fcntl(listener, libc::F_GETFL);
                libc::fcntl(listener, libc::F_SETFL, flags | libc::O_NONBLOCK);
                let accepted = libc::accept(listener, std::ptr::null_mut(), std::ptr::null_mut());
                libc::fcntl(listener, libc::F_SETFL, flags);
                [opened, accepted, listener].into_iter().for_each(&mut add);
            }
            add(libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0));
            libc::pipe2(two.as_mut_ptr(), 0);
            two.into_iter().for_each(&mut add);
            libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, two.as_mut_ptr());
            two.into_iter().for_each(&mut add);
            libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, two.as_mut_ptr());
            two.into_iter().for_each(&mut add);
            add(libc::eventfd(0, 0));
            let full = libc::eventfd(0, libc::EFD_NONBLOCK);
            libc::write(full, (u64::MAX - 1).to_ne_bytes().as_ptr().cast(), 8);
            libc::fcntl(full, libc::F_SETFL, 0);
            add(full);
            add(libc::epoll_create1(0));
            add(libc::timerfd_create(libc::CLOCK_MONOTONIC, 0));
            add(libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) as i32);
            for (len, seals) in
                [(0, 0), (4096, 0), (1 << 21, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW), (1 << 30, libc::F_SEAL_SHRINK)]
            {
                let fd = libc::memfd_create(c"nothing".as_ptr(), libc::MFD_ALLOW_SEALING);
                libc::ftruncate(fd, len);
                libc::fcntl(fd, libc::F_ADD_SEALS, seals);
                add(fd);
            }
            let request = libc::memfd_create(c"request".as_ptr(), libc::MFD_ALLOW_SEALING);
            let text = br#"{"target":{"unit":"nginx.service"},"off":true}"#;
            libc::write(request, text.as_ptr().cast(), text.len());
            libc::fcntl(request, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK);
            add(request);
            let arena = libc::memfd_create(c"arena".as_ptr(), libc::MFD_ALLOW_SEALING);
            libc::ftruncate(arena, fsocket_abi::arena::ARENA_SIZE as i64);
            libc::fcntl(arena, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
            let mut label = fsocket_abi::arena::MAGIC.to_ne_bytes().to_vec();
            label.extend(fsocket_abi::VERSION.to_ne_bytes());
            libc::pwrite(arena, label.as_ptr().cast(), label.len(), 0);
            add(arena);
        }
        Descriptors(fds)
    }

    pub fn all(&self) -> &[i32] {
        &self.0
    }

    /// Closes all descriptors but `own`, which the caller cannot make again.
    pub fn close(self) {
        for fd in &self.0[1..] {
            let _ = sys::close(*fd);
        }
    }
}
