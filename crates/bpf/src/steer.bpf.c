/* Receive Flow Deliver: hands an incoming TCP packet to the CPU where its application runs,
 * before the network stack sees the packet (XDP, then a cpumap).
 *
 * The choice of the CPU depends on data in maps: the source-port slices, the flow groups, and
 * where an application has opened or last read a connection. A change of these is a write to a
 * map; the program is not loaded again.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "counters.h"
#include "flow.h"
#include "steer.h"
#include "steer_parse.h"

char LICENSE[] SEC("license") = "GPL";

/* How the CPU for packets of a class is chosen. */
enum policy {
	/* No choice: packets stay on the CPU that RSS has chosen. */
	POLICY_STAY,
	/* By the connection's source-port slice (active connections). */
	POLICY_SLICE,
	/* By the client's flow group (passive connections). */
	POLICY_GROUP,
	/* The CPU on which the application last read this socket. */
	POLICY_READ,
	/* The CPU on which the application opened this socket. */
	POLICY_OPENED,
	/* The operator's own program decides. */
	POLICY_USER,
};

struct config {
	__u32 active;
	__u32 passive;
	/* Not 0: ask the socket table for a listener, instead of using well-known ports (the
	 * paper's third rule alone). */
	__u32 precise;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct config);
} settings SEC(".maps");

/* 1 + CPU, by port / 16; 0: no slice. The smallest slice has 16 ports. */
#define SLICE_SHIFT 4
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 >> SLICE_SHIFT);
	__type(key, __u32);
	__type(value, __u32);
} slices SEC(".maps");

/* 1 + CPU, by the low 12 bits of the client's port (Affinity-Accept, 3.1); 0: the packet stays.
 */
#define GROUPS 4096
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GROUPS);
	__type(key, __u32);
	__type(value, __u32);
} groups SEC(".maps");

/* Not 0: some socket listens on this port. The monitor writes this map. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u8);
} listened SEC(".maps");

/* 1 + the CPU on which the application uses the connection. readcpu.bpf.c shares this map, and
 * writes it. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow);
	__type(value, __u32);
} flows SEC(".maps");

/* The operator's own policy, if there is one, in slot 0. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} policies SEC(".maps");

/* The id of our cpumap, because others may have cpumaps, too. Set after loading. */
__u32 cpus_id = 0;

static __always_inline bool has_listener(struct xdp_md *ctx, const struct steer_packet *packet)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	__u32 size;
	bool listens;

	/* The remote port stays 0, so that no connection matches. */
	if (packet->version == 4) {
		tuple.ipv4.saddr = packet->remote_ip[3];
		tuple.ipv4.daddr = packet->local_ip[3];
		tuple.ipv4.dport = bpf_htons(packet->local_port);
		size = sizeof(tuple.ipv4);
	} else {
		for (int i = 0; i < 4; i++) {
			tuple.ipv6.saddr[i] = packet->remote_ip[i];
			tuple.ipv6.daddr[i] = packet->local_ip[i];
		}
		tuple.ipv6.dport = bpf_htons(packet->local_port);
		size = sizeof(tuple.ipv6);
	}
	sk = bpf_skc_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	listens = sk->state == TCP_LISTEN;
	bpf_sk_release(sk);
	return listens;
}

static __always_inline __u8 classify(struct xdp_md *ctx, const struct config *config,
				     const struct steer_packet *packet)
{
	__u32 port = packet->local_port;
	__u8 *listens;

	if (config->precise)
		return has_listener(ctx, packet) ? STEER_PASSIVE : STEER_ACTIVE;
	if (packet->remote_port < 1024)
		return STEER_ACTIVE;
	if (port < 1024)
		return STEER_PASSIVE;
	listens = bpf_map_lookup_elem(&listened, &port);
	return listens && *listens ? STEER_PASSIVE : STEER_ACTIVE;
}

static __always_inline __u32 user_of(const struct steer_packet *packet)
{
	struct flow flow = { .local_port = packet->local_port, .remote_port = packet->remote_port };
	__u32 *cpu;

	for (int i = 0; i < 4; i++) {
		flow.local_ip[i] = packet->local_ip[i];
		flow.remote_ip[i] = packet->remote_ip[i];
	}
	cpu = bpf_map_lookup_elem(&flows, &flow);
	return cpu ? *cpu : 0;
}

/* The CPU for the packet; negative: it stays. */
static __always_inline int decide(__u32 policy, struct steer_packet *packet)
{
	__u32 *found;

	switch (policy) {
	case POLICY_SLICE:
		return (int)packet->slice - 1;
	case POLICY_GROUP:
		found = bpf_map_lookup_elem(&groups, &packet->group);
		return found ? (int)*found - 1 : -1;
	case POLICY_READ:
	case POLICY_OPENED:
		return (int)user_of(packet) - 1;
	}
	return -1;
}

/* Continues with the policy in slot 0. Returns only if there is none. */
static __always_inline void leave_to_user(struct xdp_md *ctx, const struct steer_packet *packet)
{
	__u32 zero = 0;
	struct steer_packet *shown = bpf_map_lookup_elem(&packets, &zero);

	if (!shown)
		return;
	*shown = *packet;
	bpf_tail_call(ctx, &policies, 0);
}

/* Loaded with or without BPF_F_XDP_HAS_FRAGS; see steer.rs. */
SEC("xdp")
int steer(struct xdp_md *ctx)
{
	struct steer_packet packet = {};
	struct config *now;
	__u32 zero = 0, slice, policy, *cpu;

	switch (parse((void *)(long)ctx->data, (void *)(long)ctx->data_end, &packet)) {
	case PARSED_TCP:
		break;
	case PARSED_FRAGMENT:
		COUNT(reasons, FRAGMENT);
		return XDP_PASS;
	case PARSED_SHORT:
		COUNT(reasons, SHORT);
		return XDP_PASS;
	default:
		COUNT(reasons, NOT_TCP);
		return XDP_PASS;
	}
	now = bpf_map_lookup_elem(&settings, &zero);
	if (!now)
		return XDP_PASS;
	packet.klass = classify(ctx, now, &packet);
	packet.cpu = bpf_get_smp_processor_id();
	packet.rx_queue = ctx->rx_queue_index;
	packet.group = packet.remote_port & (GROUPS - 1);
	slice = packet.local_port >> SLICE_SHIFT;
	cpu = bpf_map_lookup_elem(&slices, &slice);
	packet.slice = cpu ? *cpu : 0;

	policy = packet.klass == STEER_ACTIVE ? now->active : now->passive;
	if (policy == POLICY_USER)
		leave_to_user(ctx, &packet);
	return steer_to(&packet, decide(policy, &packet));
}

/* Frames are queued in bulk after the verdict, so a full queue shows only here. */
SEC("tp_btf/xdp_cpumap_enqueue")
int BPF_PROG(enqueued, int map_id, unsigned int processed, unsigned int drops, int to_cpu)
{
	__u32 key = QUEUE_FULL;
	__u64 *count;

	if (!drops || map_id != cpus_id)
		return 0;
	count = bpf_map_lookup_elem(&reasons, &key);
	if (count)
		__sync_fetch_and_add(count, drops);
	return 0;
}
