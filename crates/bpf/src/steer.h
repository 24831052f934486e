/* What steering policies see of a packet. */
#ifndef FSOCKET_STEER_H
#define FSOCKET_STEER_H

/* The paper's two kinds of incoming packets (section 3.3). */
enum steer_class {
	STEER_PASSIVE = 1,
	STEER_ACTIVE = 2,
};

/* An incoming TCP packet, seen from this host. */
struct steer_packet {
	/* Network byte order; IPv4 in v4-mapped form. */
	__u32 local_ip[4];
	__u32 remote_ip[4];
	/* Host byte order. */
	__u16 local_port;
	__u16 remote_port;
	/* 4 or 6. */
	__u8 version;
	/* enum steer_class. */
	__u8 klass;
	/* Byte 13 of the TCP header: FIN 1, SYN 2, RST 4, ACK 16. */
	__u8 tcp_flags;
	__u8 pad;
	/* CPU that handles the packet now, and its receive queue. */
	__u32 cpu;
	__u32 rx_queue;
	/* 1 + the CPU to whose source-port slice local_port belongs; 0: none. */
	__u32 slice;
	/* Flow group of the client: the low 12 bits of remote_port. */
	__u32 group;
};

enum steer_reason {
	/* Verdicts on TCP packets. */
	TO_SELF,
	TO_OTHER,
	PASSED_ACTIVE,
	PASSED_PASSIVE,
	/* Packets that are not steered. */
	NOT_TCP,
	FRAGMENT,
	SHORT,
	/* The policy chose a CPU that takes no part in steering. */
	NO_CPU,
	/* The CPU's queue was full, so the kernel dropped the packet. */
	QUEUE_FULL,
	STEER_REASONS,
};

/* Maps that the programs of one device share; the loader makes sure that they are the same. */

/* Number of verdicts, by the CPU that gave them. */
COUNTERS(reasons, STEER_REASONS);

/* By CPU number; sized by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bpf_cpumap_val);
} cpus SEC(".maps");

/* The present packet, for the operator's own policy. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct steer_packet);
} packets SEC(".maps");

/* The verdict that sends the packet to `cpu`; negative: the packet stays. */
static __always_inline int steer_to(const struct steer_packet *packet, int cpu)
{
	if (cpu < 0) {
		COUNT(reasons, packet->klass == STEER_ACTIVE ? PASSED_ACTIVE : PASSED_PASSIVE);
		return XDP_PASS;
	}
	if (cpu == packet->cpu) {
		COUNT(reasons, TO_SELF);
		return XDP_PASS;
	}
	if (bpf_redirect_map(&cpus, cpu, XDP_PASS) != XDP_REDIRECT) {
		COUNT(reasons, NO_CPU);
		return XDP_PASS;
	}
	COUNT(reasons, TO_OTHER);
	return XDP_REDIRECT;
}

#endif
