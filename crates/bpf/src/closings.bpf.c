/* Counts for each port how often a socket has begun or stopped to listen, in all network
 * namespaces together. A client reads the count before the monitor tells it about a listener. If
 * the count is still the same later, the answer is still right. This covers every way of closing
 * a listener, and a nearer listener that came.
 *
 * The tracepoint runs before `close` (or `shutdown`, or the end of the process) returns, while
 * the socket still has its port. So a program that binds the port next does so after the count.
 * There are two small gaps: The kernel gives back a port that it has chosen itself some
 * instructions before the count. And others can find a socket that begins to listen some
 * instructions after the count only.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

#define PORTS 65536

/* One value, which clients map for reading. */
struct counts {
	__u32 of[PORTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counts);
} closings SEC(".maps");

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(closes, struct sock *sk, int old, int new)
{
	struct counts *counts;
	__u32 zero = 0;
	__be16 port = 0;

	if ((old == TCP_LISTEN) == (new == TCP_LISTEN))
		return 0;
	/* `skc_num` is 0 by now if the kernel has chosen the port. */
	bpf_core_read(&port, sizeof(port), &((struct inet_sock *)sk)->inet_sport);
	counts = bpf_map_lookup_elem(&closings, &zero);
	if (counts)
		__sync_fetch_and_add(&counts->of[bpf_ntohs(port)], 1);
	return 0;
}
