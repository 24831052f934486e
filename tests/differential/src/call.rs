//! The calls that a program can consist of: names, arguments, and results.

use crate::symbols::{self as sym, Names};

/// The kind of an argument, in a program's text and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `v3`: the descriptor number that a step stored under that name.
    Var,
    /// `p1`: a port that a `listen` stored; `-`: port 0.
    Port,
    /// `a2`: an actor.
    Actor,
    Int,
    Bits(Names),
    One(Names),
    /// Index into [`sym::OPTIONS`].
    Opt,
    /// The rest of the line: `v3:IN|OUT v4:IN`.
    List(Names),
}
use Kind::{Actor, Bits, Int, List, One, Opt, Port, Var};

/// The form of a call.
#[derive(Debug)]
pub struct Spec {
    pub name: &'static str,
    pub args: &'static [Kind],
    /// Number of consecutive variables that get descriptors.
    pub outs: usize,
}

macro_rules! calls {
    ($($id:ident $name:literal [$($kind:expr),*] $outs:literal;)*) => {
        /// A call by number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u32)]
        pub enum Call { $($id),* }
        static SPECS: &[Spec] = &[$(Spec { name: $name, args: &[$($kind),*], outs: $outs }),*];
        const ALL: &[Call] = &[$(Call::$id),*];
    };
}

calls! {
    Socket "socket" [One(sym::FAMILY), Bits(sym::SOCK_TYPE)] 1;
    Bind "bind" [Var, One(sym::ADDR), Port] 0;
    // listen(); the answer contains the port that it got
    Listen "listen" [Var, Int, Port] 0;
    Accept "accept" [Var] 1;
    // accept() that does not ask for the address
    AcceptNull "accept_null" [Var] 1;
    Accept4 "accept4" [Var, Bits(sym::SOCK_TYPE)] 1;
    // connect(); the answer contains the port that it got
    Connect "connect" [Var, One(sym::ADDR), Port] 0;
    ConnectUnspec "connect_unspec" [Var] 0;
    // connect() of one of many clients that come in any order; `accept_all` takes all of them
    Come "come" [Var, One(sym::ADDR), Port] 0;
    // accepts all waiting connections, reads what each client has sent, and closes them, in any
    // order
    AcceptAll "accept_all" [Var] 0;
    // sends a message and receives its answer, this many times, with `echo` at the other end
    Ping "ping" [Var, Int] 0;
    Echo "echo" [Var, Int] 0;
    Shutdown "shutdown" [Var, One(sym::HOW)] 0;
    Close "close" [Var] 0;
    CloseRange "close_range" [Var, Var] 0;
    GetSockName "getsockname" [Var] 0;
    GetPeerName "getpeername" [Var] 0;
    // I/O: descriptor, bytes, ...
    Send "send" [Var, Int, Bits(sym::MSG)] 0;
    Recv "recv" [Var, Int, Bits(sym::MSG)] 0;
    SendTo "sendto" [Var, Int, Bits(sym::MSG)] 0;
    RecvFrom "recvfrom" [Var, Int, Bits(sym::MSG)] 0;
    Write "write" [Var, Int] 0;
    Read "read" [Var, Int] 0;
    // descriptor, bytes, number of pieces, ...
    WriteV "writev" [Var, Int, Int] 0;
    ReadV "readv" [Var, Int, Int] 0;
    SendMsg "sendmsg" [Var, Int, Int, Bits(sym::MSG)] 0;
    RecvMsg "recvmsg" [Var, Int, Int, Bits(sym::MSG)] 0;
    // descriptor, bytes of a message, number of messages, ...
    SendMmsg "sendmmsg" [Var, Int, Int, Bits(sym::MSG)] 0;
    RecvMmsg "recvmmsg" [Var, Int, Int, Bits(sym::MSG)] 0;
    // with offset -1
    PwriteV2 "pwritev2" [Var, Int, Int] 0;
    PreadV2 "preadv2" [Var, Int, Int] 0;
    // out, in, offset (-1: the file's position), bytes
    SendFile "sendfile" [Var, Var, Int, Int] 0;
    // send(MSG_MORE), then send(). They are one step, because the kernel chooses for how long
    // held-back bytes are not visible
    SendMore "send_more" [Var, Int, Int] 0;
    // through a new pipe: descriptor, bytes, flags
    SpliceTo "splice_to" [Var, Int, Int] 0;
    SpliceFrom "splice_from" [Var, Int, Int] 0;
    SetOpt "setsockopt" [Var, Opt, Int] 0;
    GetOpt "getsockopt" [Var, Opt] 0;
    SetLinger "set_linger" [Var, Int, Int] 0;
    GetLinger "get_linger" [Var] 0;
    // milliseconds
    SetRcvTimeo "set_rcvtimeo" [Var, Int] 0;
    SetSndTimeo "set_sndtimeo" [Var, Int] 0;
    GetRcvTimeo "get_rcvtimeo" [Var] 0;
    GetSndTimeo "get_sndtimeo" [Var] 0;
    // level, number, length (and value)
    SetAny "setsockopt_any" [Var, Int, Int, Int, Int] 0;
    GetAny "getsockopt_any" [Var, Int, Int, Int] 0;
    // descriptor, other descriptor, call, whether by `syscall`, number of the bad argument, how it
    // is bad, bytes, milliseconds
    Any "call" [Var, Var, One(crate::actor::ANY), Int, Int, One(sym::NOWHERE), Int, Int] 0;
    // changes one attribute of the socket
    Touch "touch" [Var, One(sym::TOUCH)] 0;
    // reports all these attributes
    Attributes "attributes" [Var] 0;
    // puts the socket into a BPF map of sockets, by its number
    SockMap "sockmap" [Var] 0;
    // descriptor, call, a power of two (its exponent), what is added to the power: a length
    Long "long" [Var, One(crate::actor::LONG), Int, Int] 0;
    TcpState "tcp_state" [Var] 0;
    // shows what options do: sends until there is no room, and reports whether little or much
    // fitted
    Fill "fill" [Var] 0;
    // reads until no more bytes arrive
    Drain "drain" [Var] 0;
    // sends and waits for room, in `poll` (0) or in `send` (1), for this many milliseconds; reports
    // the error that ends it
    Stuck "stuck" [Var, Int, Int] 0;
    // milliseconds: has that much time passed since this actor's last `clock`?
    Clock "clock" [] 0;
    Passed "passed" [Int] 0;
    // number of connections that wait at a listener, from TCP_INFO
    Queue "queue" [Var] 0;
    // SO_ORIGINAL_DST of IPv4 (0) or IPv6 (41)
    OrigDst "original_destination" [Var, Int] 0;
    GetFl "getfl" [Var] 0;
    SetFl "setfl" [Var, Bits(sym::FILE_FLAGS)] 0;
    GetFd "getfd" [Var] 0;
    SetFd "setfd" [Var, Bits(sym::FD_FLAGS)] 0;
    Dup "dup" [Var] 1;
    Dup2 "dup2" [Var, Var] 0;
    Dup3 "dup3" [Var, Var, Bits(sym::CLOEXEC)] 0;
    // gives a descriptor the number 0, 1 or 2: by dup2, dup3, close and dup, or close and F_DUPFD
    DupOnto "dup_onto" [Var, Int, Int] 1;
    // closes such a number, which /dev/null then takes
    CloseStd "close_std" [Var] 0;
    // descriptor, bytes, how: runs a program with the descriptor as standard input and output,
    // which writes the bytes that it reads
    Child "child" [Var, Int, Int] 0;
    DupFd "dupfd" [Var, Int] 1;
    DupFdCloexec "dupfd_cloexec" [Var, Int] 1;
    NbIo "fionbio" [Var, Int] 0;
    FionRead "fionread" [Var] 0;
    AtMark "sockatmark" [Var] 0;
    OutQ "siocoutq" [Var] 0;
    // milliseconds, then descriptors with events
    Poll "poll" [Int, List(sym::POLL)] 0;
    PPoll "ppoll" [Int, Bits(sym::MASK), List(sym::POLL)] 0;
    Select "select" [Int, List(sym::SELECT)] 0;
    PSelect "pselect" [Int, Bits(sym::MASK), List(sym::SELECT)] 0;
    EpollCreate "epoll_create" [Bits(sym::CLOEXEC)] 1;
    EpollAdd "epoll_add" [Var, Var, Bits(sym::POLL)] 0;
    EpollMod "epoll_mod" [Var, Var, Bits(sym::POLL)] 0;
    EpollDel "epoll_del" [Var, Var] 0;
    // instance, maximum number of events, milliseconds
    EpollWait "epoll_wait" [Var, Int, Int] 0;
    EpollPwait "epoll_pwait" [Var, Int, Int, Bits(sym::MASK)] 0;
    EpollPwait2 "epoll_pwait2" [Var, Int, Int, Bits(sym::MASK)] 0;
    Pipe "pipe" [Bits(sym::SOCK_TYPE)] 2;
    EventFd "eventfd" [Int, Bits(sym::SOCK_TYPE)] 1;
    // a timer that has fired (1) or never will (0)
    TimerFd "timerfd" [Int] 1;
    SocketPair "socketpair" [Bits(sym::SOCK_TYPE)] 2;
    // a file with this many bytes
    File "file" [Int] 1;
    SendFd "send_fd" [Var, Var] 0;
    RecvFd "recv_fd" [Var] 1;
    Sleep "sleep" [Int] 0;
    // handlers of USR1, USR2 and PIPE with SA_RESTART (1), or without (0)
    SetRestart "sa_restart" [Int] 0;
    BlockSignals "block_signals" [Bits(sym::MASK)] 0;
    Fork "fork" [Actor] 0;
    Thread "thread" [Actor] 0;
    Exec "exec" [] 0;
    // vfork() (0) or clone() (1): what the child does with the descriptor; the answer is how the
    // child ended
    VFork "vfork" [Var, One(sym::VFORK), Int] 0;
    // a process that shares its descriptors (CLONE_FILES)
    CloneFiles "clone_files" [Actor] 0;
    // gives this thread a descriptor table of its own
    Unshare "unshare_files" [One(sym::UNSHARE)] 0;
    // PR_SET_CHILD_SUBREAPER
    Subreaper "subreaper" [Int] 0;
    // collects all children that have ended: their number, and the final result of waitpid()
    Reap "reap" [] 0;
    // sets the soft and the hard limit
    Limit "limit" [One(sym::LIMIT), Int] 0;
    Exit "exit" [] 0;
    // made by the scheduler
    Kill "kill" [Actor] 0;
    Signal "signal" [Actor, One(sym::SIGNAL)] 0;
}

impl Call {
    pub fn spec(self) -> &'static Spec {
        &SPECS[self as usize]
    }
    pub fn by_name(name: &str) -> Option<Call> {
        ALL.iter().copied().find(|c| c.spec().name == name)
    }
    pub fn by_number(n: u32) -> Option<Call> {
        ALL.get(n as usize).copied()
    }
    /// Does the scheduler make the call, on an actor?
    pub fn is_external(self) -> bool {
        matches!(self, Call::Kill | Call::Signal)
    }
    /// Does the call send bytes from the step's pattern?
    pub fn sends(self) -> bool {
        use Call::*;
        matches!(
            self,
            Send | SendTo
                | Write
                | WriteV
                | SendMsg
                | SendMmsg
                | PwriteV2
                | SendFile
                | SendMore
                | SpliceTo
                | Any
                | Long
                | Child
        )
    }
}
