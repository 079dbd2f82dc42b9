package endtoend_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// exporter exports the kinds of its tenant during writes. Answers have all sizes and break off
// anywhere. It keeps the states with the positions at which the streams continue. In the end joined
// applies the streams to each export.
type exporter struct {
	client
	rng    *rand.Rand
	set    func() *kinds.Set
	tenant int64
	now    *export
	done   []*export
}

// export is one export of a kind, as a subscriber keeps it.
type export struct {
	kind, plural  string
	cursor, after string
	positions     map[int]uint64    // by partition
	states        map[string]entity // by the entity's id
	answers       int
}

// entity is one version of an entity, from a payload.
type entity struct {
	version int64
	state   string // without the actor
}

// names returns the members of a payload that identify an entity of the kind.
func names(set *kinds.Set, kind string) []string {
	if k, ok := set.Edge(kind); ok {
		return k.Ends[:]
	}
	if k, ok := set.Child(kind); ok {
		return []string{k.Names().ID}
	}
	return []string{"post_id", "kind"}
}

// entityOf reads a payload.
func entityOf(set *kinds.Set, kind string, payload []byte) (id string, e entity, err error) {
	var members map[string]any
	d := json.NewDecoder(bytes.NewReader(payload))
	d.UseNumber()
	if err := d.Decode(&members); err != nil {
		return "", e, fmt.Errorf("%s: %w", payload, err)
	}
	for _, name := range names(set, kind) {
		id += fmt.Sprint(members[name], " ")
	}
	e.version, err = strconv.ParseInt(fmt.Sprint(members["version"]), 10, 64)
	delete(members, "actor")
	delete(members, "reason")
	e.state = fmt.Sprint(members)
	return id, e, err
}

// step requests one more answer.
func (x *exporter) step() error {
	set := x.set()
	if x.now == nil {
		plurals := map[string]string{event.AggregateThread: "threads"}
		for _, k := range set.AllEdges() {
			plurals[k.Name] = k.Plural
		}
		for _, k := range set.AllChildren() {
			plurals[k.Name] = k.Plural
		}
		all := slices.Sorted(maps.Keys(plurals))
		kind := all[len(x.done)%len(all)] // the kinds take turns
		x.now = &export{kind: kind, plural: plurals[kind], states: map[string]entity{}}
	}
	e := x.now
	query := url.Values{"lines": {strconv.Itoa(1 + x.rng.IntN(60))}}
	for name, value := range map[string]string{"cursor": e.cursor, "after": e.after} {
		if value != "" {
			query.Set(name, value)
		}
	}
	a := x.call(http.MethodGet, "/v1/"+e.plural+":export?"+query.Encode(), "")
	if a.status == http.StatusServiceUnavailable {
		return nil
	}
	if a.status != http.StatusOK {
		return fmt.Errorf("export of %s: %d %s", e.plural, a.status, a.body)
	}
	e.answers++
	lines := slices.Collect(bytes.Lines(a.body))
	if x.rng.IntN(3) == 0 {
		lines = lines[:1+x.rng.IntN(len(lines))] // the answer breaks off here, in the middle of a line
		last := len(lines) - 1
		lines[last] = lines[last][:x.rng.IntN(len(lines[last]))]
	}
	for _, line := range lines {
		if !bytes.HasSuffix(line, []byte("\n")) {
			return nil // an incomplete line does not count
		}
		if done, err := e.take(set, line); err != nil || done {
			x.done, x.now = append(x.done, e), nil
			return err
		}
	}
	return nil
}

// take stores the content of a line, and reports whether it is the last one.
func (e *export) take(set *kinds.Set, text []byte) (done bool, err error) {
	var line struct {
		Export *struct {
			Cursor  string
			Streams []struct {
				Partition int
				Sequence  uint64 `json:",string"`
			}
		}
		After, End string
		Data       json.RawMessage
		Problem    json.RawMessage
	}
	if err := json.Unmarshal(text, &line); err != nil || line.Problem != nil {
		return false, fmt.Errorf("%s: %w", text, err)
	}
	switch {
	case line.Export != nil: // the head of an answer; a resumed export has the same positions
		e.cursor, e.positions = line.Export.Cursor, map[int]uint64{}
		for _, s := range line.Export.Streams {
			e.positions[s.Partition] = s.Sequence
		}
	case line.End != "":
		return line.End == "done", nil
	default:
		id, got, err := entityOf(set, e.kind, line.Data)
		if err != nil {
			return false, err
		}
		if _, twice := e.states[id]; twice {
			return false, fmt.Errorf("%s %s comes twice in one export", e.kind, id)
		}
		e.states[id], e.after = got, line.After
	}
	return false, nil
}

// behind reports whether a reader must apply a message after the export.
func (e *export) behind(partition int, seq uint64) bool {
	if at, ok := e.positions[partition]; ok {
		return seq > at
	}
	// A partition with a higher number is newer. The others were closed before the export began.
	return partition > slices.Max(slices.Collect(maps.Keys(e.positions)))
}

// streamed is an event on the streams.
type streamed struct {
	partition int
	seq       uint64
	event.Event
	id string
	entity
}

// schemas returns the contracts of the payloads by ce-type. They also check formats.
func schemas(set *kinds.Set) (map[string]*jsonschema.Schema, error) {
	all := map[string]*jsonschema.Schema{}
	for _, t := range contracts.Types(set, nil) {
		raw, err := contracts.Encode(t.Schema())
		if err != nil {
			return nil, err
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
		if err != nil {
			return nil, err
		}
		c := jsonschema.NewCompiler()
		c.AssertFormat()
		if err := c.AddResource(t.Name, doc); err != nil {
			return nil, err
		}
		if all[t.Name], err = c.Compile(t.Name); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// streamed reads all messages on the streams. Every message must fit its contract.
func (l *line) streamed() (all []streamed, err error) {
	contract, err := schemas(l.kinds.Now())
	if err != nil {
		return nil, err
	}
	types := map[string]int{}
	defer func() { l.t.Logf("messages by type: %v", types) }()
	streams, err := broker.Streams(l.t.Context(), l.js, l.nats.Config())
	for _, s := range streams {
		_, serr := broker.Scan(l.t.Context(), l.js, l.nats.Config(), s.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if _, closing := m.Header[event.HeaderClosed]; closing {
				return nil
			}
			e, err := event.Decode(m.Subject, m.Header, m.Data)
			if err != nil {
				return err
			}
			name := e.CloudEventsType()
			types[name]++
			payload, err := jsonschema.UnmarshalJSON(bytes.NewReader(e.Payload))
			if err != nil {
				return err
			}
			if contract[name] == nil {
				l.t.Errorf("there is no contract of %s", name)
			} else if err := contract[name].Validate(payload); err != nil {
				l.t.Errorf("%s does not fit its contract: %v", e.Payload, err)
			}
			id, got, err := entityOf(l.kinds.Now(), e.AggregateType, e.Payload)
			all = append(all, streamed{s.Number, m.Seq, e, id, got})
			return err
		})
		err = errors.Join(err, serr)
	}
	return all, err
}

// truth returns all entities of a kind of the tenant, with the reader that verify uses.
func truth(ctx context.Context, pool *pgxpool.Pool, set *kinds.Set, kind string, tenant int64) (map[string]entity, error) {
	events := store.SettingsEvents(store.ScanSettings(ctx, pool, nil, 0))
	if k, ok := set.Edge(kind); ok {
		events = store.EdgeEvents(k, store.ScanEdges(ctx, pool, k, nil, 0))
	} else if k, ok := set.Child(kind); ok {
		events = store.ChildEvents(k, store.ScanChildren(ctx, pool, k, nil, 0))
	}
	return collect(set, kind, tenant, events)
}

func collect(set *kinds.Set, kind string, tenant int64, events iter.Seq2[event.Event, error]) (map[string]entity, error) {
	all := map[string]entity{}
	for e, err := range events {
		if err != nil {
			return nil, err
		}
		if e.TenantID != tenant {
			continue
		}
		id, got, err := entityOf(set, kind, e.Payload)
		if err != nil {
			return nil, err
		}
		all[id] = got
	}
	return all, nil
}

// joined compares the truth with each export after the events behind its positions are applied by
// version.
func (l *line) joined(exporters []*exporter) {
	l.t.Helper()
	events, err := l.streamed()
	if err != nil {
		l.t.Fatal(err)
	}
	exports, answers, older, newer := 0, 0, 0, 0
	for _, x := range exporters {
		truths := map[string]map[string]entity{}
		for _, e := range x.done {
			want := truths[e.kind]
			if want == nil {
				if want, err = truth(l.t.Context(), l.system, l.kinds.Now(), e.kind, x.tenant); err != nil {
					l.t.Fatal(err)
				}
				truths[e.kind] = want
			}
			exports, answers, older = exports+1, answers+e.answers, older+len(e.states)
			for i := range events {
				if m := &events[i]; m.TenantID == x.tenant && m.AggregateType == e.kind && e.behind(m.partition, m.seq) &&
					m.version > e.states[m.id].version {
					e.states[m.id] = m.entity
					newer++
				}
			}
			if diff := gocmp.Diff(want, e.states, gocmp.AllowUnexported(entity{})); diff != "" {
				l.t.Errorf("tenant %d, %s, joined behind %v (-truth +joined):\n%.2000s", x.tenant, e.kind, e.positions, diff)
			}
		}
	}
	if exports == 0 || answers <= exports || older == 0 || newer == 0 {
		l.t.Errorf("%d exports in %d answers, of %d states, and %d newer ones from the streams: want some of each",
			exports, answers, older, newer)
	}
	l.t.Logf("%d exports in %d answers, of %d states, and %d newer ones from the streams", exports, answers, older, newer)
}
