/* Locality: does the CPU on which the application runs also handle the packet?
 *
 * The handling CPU is the one that runs the ingress filter of the packet's socket. (That is in
 * tcp_v4_rcv(), in softirq, after RPS and cpumap, and before the backlog.) The application's CPU
 * is the one that last read, wrote or connected this socket. If packets come before the
 * application has touched an accepted connection, they are noted in the socket's record, and
 * judged when the application touches it.
 *
 * Only packets of established sockets count. Packets before (SYN, SYN-ACK, the last ACK of the
 * handshake) or after (TIME_WAIT) belong to no application.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define WAITING 4

enum kind {
	/* Established before the measurement began, so the kind is unknown. */
	KIND_OLDER,
	KIND_PASSIVE,
	KIND_ACTIVE,
};

/* A connection. `app` is 1 + CPU, 0 while no application has touched it. */
struct conn {
	__u32 tgid;
	__u32 app;
	__u32 kind;
	/* Number of packets before the first touch, by the CPU that handled them (1 + CPU). */
	struct {
		__u32 cpu;
		__u32 packets;
	} waiting[WAITING];
};

struct cell {
	__u32 tgid;
	__u16 kind;
	__u16 handled;
	__u32 app;
};

struct owner {
	char comm[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct conn);
} conns SEC(".maps");

/* Packets by process, kind of connection, handling CPU and application CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct cell);
	__type(value, __u64);
} cells SEC(".maps");

/* Names of processes by tgid. They are stored here, because a short-lived process is gone when
 * the reader asks. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct owner);
} owners SEC(".maps");

enum reason {
	/* Packets on sockets that no application had touched when they came. */
	WAITING_PACKETS,
	/* ... those of them that were judged later. */
	JUDGED,
	/* More than WAITING CPUs handled packets of one untouched connection. */
	TOO_MANY_CPUS,
	/* No memory for a socket's record. */
	NO_RECORD,
	/* `cells` is full. */
	NO_CELL,
	REASONS,
};
COUNTERS(reasons, REASONS);

static __always_inline void add(const struct conn *conn, __u32 handled, __u64 packets)
{
	struct cell cell = {
		.tgid = conn->tgid, .kind = conn->kind, .handled = handled, .app = conn->app - 1
	};
	__u64 *count = bpf_map_lookup_elem(&cells, &cell);

	if (!count) {
		__u64 zero = 0;

		bpf_map_update_elem(&cells, &cell, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&cells, &cell);
		if (!count) {
			COUNT(reasons, NO_CELL);
			return;
		}
	}
	__sync_fetch_and_add(count, packets);
}

static __always_inline void wait_for_application(struct conn *conn, __u32 cpu)
{
	COUNT(reasons, WAITING_PACKETS);
	for (int i = 0; i < WAITING; i++) {
		__u32 seen = conn->waiting[i].cpu;

		if (!seen)
			seen = __sync_val_compare_and_swap(&conn->waiting[i].cpu, 0, cpu + 1) ?: cpu + 1;
		if (seen == cpu + 1) {
			__sync_fetch_and_add(&conn->waiting[i].packets, 1);
			return;
		}
	}
	COUNT(reasons, TOO_MANY_CPUS);
}

/* The application uses the socket. Called in the application's own context. */
static __always_inline void touched(struct sock *sk)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct conn *conn = bpf_sk_storage_get(&conns, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (!conn) {
		COUNT(reasons, NO_RECORD);
		return;
	}
	if (conn->tgid != tgid) {
		struct owner owner = {};

		bpf_get_current_comm(&owner.comm, sizeof(owner.comm));
		bpf_map_update_elem(&owners, &tgid, &owner, BPF_ANY);
		conn->tgid = tgid;
	}
	conn->app = bpf_get_smp_processor_id() + 1;
	for (int i = 0; i < WAITING; i++) {
		__u32 cpu = conn->waiting[i].cpu;
		__u32 packets = __sync_lock_test_and_set(&conn->waiting[i].packets, 0);

		if (cpu && packets) {
			__u32 key = JUDGED;
			__u64 *judged = bpf_map_lookup_elem(&reasons, &key);

			add(conn, cpu - 1, packets);
			if (judged)
				__sync_fetch_and_add(judged, packets);
		}
	}
}

static __always_inline bool is_tcp(struct sock *sk)
{
	__u16 family = sk->__sk_common.skc_family;

	return (family == AF_INET || family == AF_INET6) && sk->sk_protocol == IPPROTO_TCP;
}

SEC("cgroup_skb/ingress")
int packet(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct conn *conn;
	__u32 cpu;

	if (!sk)
		return 1;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->protocol != IPPROTO_TCP)
		return 1;
	switch (sk->state) {
	case TCP_ESTABLISHED:
	case TCP_FIN_WAIT1:
	case TCP_FIN_WAIT2:
	case TCP_CLOSE_WAIT:
	case TCP_LAST_ACK:
	case TCP_CLOSING:
		break;
	default:
		return 1;
	}
	conn = bpf_sk_storage_get(&conns, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!conn) {
		COUNT(reasons, NO_RECORD);
		return 1;
	}
	cpu = bpf_get_smp_processor_id();
	if (conn->app)
		add(conn, cpu, 1);
	else
		wait_for_application(conn, cpu);
	return 1;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(state, struct sock *sk, int old, int new)
{
	struct conn *conn;

	if (!is_tcp(sk))
		return 0;
	if (new == TCP_SYN_SENT) {
		touched(sk);
		return 0;
	}
	if (new != TCP_ESTABLISHED || (old != TCP_SYN_SENT && old != TCP_SYN_RECV))
		return 0;
	conn = bpf_sk_storage_get(&conns, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (conn)
		conn->kind = old == TCP_SYN_SENT ? KIND_ACTIVE : KIND_PASSIVE;
	else
		COUNT(reasons, NO_RECORD);
	return 0;
}

/* Runs in every tcp_recvmsg() that copied something. */
SEC("tp_btf/tcp_rcv_space_adjust")
int BPF_PROG(reads, struct sock *sk)
{
	if (is_tcp(sk))
		touched(sk);
	return 0;
}

/* This tracepoint exists since Linux 6.3; without it the program is not loaded. */
SEC("tp_btf/sock_send_length")
int BPF_PROG(writes, struct sock *sk, int result, int flags)
{
	if (result > 0 && is_tcp(sk))
		touched(sk);
	return 0;
}
