package status

import (
	"context"
	"errors"
	"slices"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// States of a partition.
const (
	Open    = "open"    // relays publish to it
	Closing = "closing" // its relay publishes its current batch, and closes the stream
	Closed  = "closed"
	Waiting = "waiting" // until the partitions close whose slots it takes over
	Unknown = "unknown" // PostgreSQL is unavailable
)

// Conditions of a partition that need attention. Condition returns one of them.
const (
	Refused  = "refused"        // relays publish nothing until an operator repairs the stream
	NoLeader = "no leader"      // nobody can reach the stream now
	Failing  = "cannot publish" // relays retry
	NoStream = "no stream"
	Behind   = "replica behind"
)

// Partition is a partition and its stream, as `tidings status --json` and `tidings partitions list
// --json` print them.
type Partition struct {
	Partition int      `json:"partition"`
	Stream    string   `json:"stream"`
	FirstSlot int      `json:"first_slot"`
	LastSlot  int      `json:"last_slot"`
	After     []int    `json:"after,omitempty"` // the partitions whose slots it took over
	State     string   `json:"state"`
	Tail      uint64   `json:"tail"`      // the last sequence that is marked as published in the outbox
	FirstSeq  uint64   `json:"first_seq"` // of the stream, as are the following
	LastSeq   uint64   `json:"last_seq"`
	Messages  uint64   `json:"messages"`
	Leader    string   `json:"leader,omitempty"`         // the name of a server; empty without a cluster
	Tags      []string `json:"placement_tags,omitempty"` // the tags of the servers that hold its replicas
	Replicas  int      `json:"replicas"`
	Current   int      `json:"current_replicas"`    // replicas that have every message of the leader
	Relay     string   `json:"relay,omitempty"`     // the instance that holds its lease
	Refused   string   `json:"refused,omitempty"`   // why no relay publishes to it, and what to run
	NoLeader  string   `json:"no_leader,omitempty"` // why the stream is unknown now
	Trouble   string   `json:"trouble,omitempty"`   // why its relay cannot publish to it now; the relay retries
	Unknown   string   `json:"unknown,omitempty"`   // the server that is unavailable; its values are missing
}

// Condition returns the worst condition of the partition, and nothing if all is well or if a server
// that knows it is unavailable.
func (p Partition) Condition() string {
	switch {
	case p.Refused != "":
		return Refused
	case p.NoLeader != "":
		return NoLeader
	case p.Trouble != "":
		return Failing
	case p.State == Open && p.Replicas == 0 && p.Unknown == "":
		return NoStream
	case p.Current < p.Replicas:
		return Behind
	}
	return ""
}

// Partitions compares the partitions with their streams. If one server is unavailable, Partitions
// returns what the other one has. If both are, it returns nil.
func Partitions(ctx context.Context, src Sources) ([]Partition, error) {
	switch {
	case src.Truth == nil && src.JetStream == nil:
		return nil, nil
	case src.JetStream == nil:
		return src.partitionsAlone(ctx)
	case src.Truth == nil:
		return src.streamsAlone(ctx)
	}
	checks, err := relay.Check(ctx, src.Truth, src.JetStream, src.Broker)
	if err != nil {
		return nil, err
	}
	troubles, err := outbox.Troubles(ctx, src.Truth)
	if err != nil {
		return nil, err
	}
	all := make([]Partition, len(checks))
	for i, c := range checks {
		all[i] = Partition{Partition: c.Number, Stream: src.Broker.StreamName(c.Number), FirstSlot: c.FirstSlot,
			LastSlot: c.LastSlot, After: c.After, State: stateOf(c.Partition, c.Active), Tail: c.Tail}
		if s := c.Stream; s != nil {
			all[i].FirstSeq, all[i].LastSeq, all[i].Messages = s.First, s.Last, s.Messages
			all[i].Leader, all[i].Tags, all[i].Replicas, all[i].Current = s.Leader, s.Tags, s.Replicas, s.Current
		}
		switch {
		case errors.Is(c.Err, relay.ErrStreamRefused):
			all[i].Refused = daemon.Plain(c.Err)
		case c.Err != nil:
			all[i].NoLeader = daemon.Plain(c.Err)
		}
		all[i].tell(troubles)
	}
	return all, nil
}

// tell adds the trouble that a relay has recorded, if the streams alone did not show any.
func (p *Partition) tell(troubles []outbox.Trouble) {
	i := slices.IndexFunc(troubles, func(t outbox.Trouble) bool { return t.Partition == p.Partition })
	if i < 0 || p.Refused+p.NoLeader != "" {
		return
	}
	reason := daemon.Plain(errors.New(troubles[i].Reason))
	if troubles[i].Refused {
		p.Refused = reason
	} else {
		p.Trouble = reason
	}
}

// partitionsAlone returns the partitions as PostgreSQL has them, without their streams.
func (src Sources) partitionsAlone(ctx context.Context) (all []Partition, err error) {
	known, err := outbox.Partitions(ctx, src.Truth)
	if err != nil {
		return nil, err
	}
	active := outbox.Active(known)
	for _, p := range known {
		is := slices.ContainsFunc(active, func(a outbox.Partition) bool { return a.Number == p.Number })
		all = append(all, Partition{Partition: p.Number, Stream: src.Broker.StreamName(p.Number), FirstSlot: p.FirstSlot,
			LastSlot: p.LastSlot, After: p.After, State: stateOf(p, is), Tail: p.Tail, Unknown: ServerNATS})
	}
	return all, nil
}

// streamsAlone returns the partitions as the streams in NATS describe them.
func (src Sources) streamsAlone(ctx context.Context) (all []Partition, err error) {
	streams, err := broker.Streams(ctx, src.JetStream, src.Broker)
	if err != nil {
		return nil, err
	}
	for _, s := range streams {
		all = append(all, Partition{Partition: s.Partition.Number, Stream: s.Name, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot,
			After: s.After, State: Unknown,
			FirstSeq: s.First, LastSeq: s.Last, Messages: s.Messages, Leader: s.Leader, Tags: s.Tags, Replicas: s.Replicas,
			Current: s.Current, Unknown: ServerTruth})
	}
	return all, nil
}

func stateOf(p outbox.Partition, active bool) string {
	switch {
	case p.Closed:
		return Closed
	case !active:
		return Waiting
	case p.Closing:
		return Closing
	}
	return Open
}

// name sets the relay of each partition from the leases.
func (st *State) name() {
	for _, l := range st.Leases {
		if l.Kind != relay.LeaseKind {
			continue
		}
		for _, n := range l.Partitions {
			for i := range st.Partitions {
				if st.Partitions[i].Partition == n {
					st.Partitions[i].Relay = l.Owner
				}
			}
		}
	}
}
