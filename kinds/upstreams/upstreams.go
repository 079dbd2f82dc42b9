package upstreams

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// Upstream is the declaration of an aggregate type.
type Upstream struct {
	Name       string           `json:"name"`              // the aggregate type
	TypePrefix string           `json:"type_prefix"`       // ce-type is PREFIX.NAME.EVENT.vVERSION
	Source     string           `json:"source"`            // ce-source, a URI or a path
	IDs        kinds.IDForm     `json:"id"`                // the form of aggregate_id
	Tenants    []int64          `json:"tenants,omitempty"` // that may have events; nil: all
	MaxPayload int              `json:"max_payload"`       // in bytes, of the payload as the table's text has it
	Events     map[string]Event `json:"events"`            // by event type
	Logins     []string         `json:"logins"`            // roles of PostgreSQL that may append; their members may too
	Reason     string           `json:"reason,omitempty"`  // of this version
	IDPattern  string           `json:"id_pattern"`        // of IDs, for the table
	Removed    bool             `json:"removed,omitempty"` // the table refuses its events
}

// Event is an event type of an upstream.
type Event struct {
	Summary  string                     `json:"summary,omitempty"`
	Versions map[string]json.RawMessage `json:"versions"` // JSON Schema of the payload, by event version
	Checks   map[string]json.RawMessage `json:"checks"`   // the same for the table: Check compiles them
}

// The bounds of an upstream.
const (
	MaxUpstreams      = 200      // as many as kinds
	DefaultMaxPayload = 64 << 10 // bytes
	// MaxPayload leaves room for the headers in a message of 1 MiB, the default limit of NATS.
	MaxPayload = 1<<20 - 64<<10
	maxEvents  = 100
	maxTenants = 10000
)

var (
	name       = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)
	eventName  = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	typePrefix = regexp.MustCompile(`^[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)*$`)
	source     = regexp.MustCompile(`^[A-Za-z0-9/][!-~]{0,254}$`)
	role       = regexp.MustCompile(`^[^\x00-\x1f"]{1,63}$`)
)

// Naming returns the names of the upstream's events.
func (u *Upstream) Naming() event.Naming {
	return event.Naming{TypePrefix: u.TypePrefix, Source: u.Source}
}

// Types returns the ce-type of each event version, sorted.
func (u *Upstream) Types() (all []string) {
	for of, e := range u.Events {
		for v := range e.Versions {
			n, _ := strconv.Atoi(v) // Check has read it
			all = append(all, u.Naming().Type(&event.Event{AggregateType: u.Name, Type: of, Version: n}))
		}
	}
	slices.Sort(all)
	return all
}

// Check completes u with defaults, and returns all violated rules, each with its path in the file.
func (u *Upstream) Check() []Fault {
	var all []Fault
	want := func(ok bool, format string, args ...any) func(path ...string) {
		return func(path ...string) {
			if !ok {
				all = append(all, Fault{path, fmt.Sprintf(format, args...)})
			}
		}
	}
	if u.MaxPayload == 0 {
		u.MaxPayload = DefaultMaxPayload
	}
	if u.IDs == "" {
		u.IDs = kinds.String
	}
	u.IDPattern = u.IDs.Pattern()
	want(name.MatchString(u.Name), "%.80q is not a valid name: want a letter, then up to 63 letters, digits, _ and -",
		u.Name)("upstream")
	want(!Reserved(kinds.Builtin(), u.Name), "%q is the name of a kind or of events of Tidings", u.Name)("upstream")
	want(len(u.TypePrefix) <= 128 && typePrefix.MatchString(u.TypePrefix) && u.TypePrefix != "tidings" &&
		!strings.HasPrefix(u.TypePrefix, "tidings."), "%.80q: want a reversed domain name of yours, like com.example",
		u.TypePrefix)("type_prefix")
	for _, l := range u.Logins {
		want(role.MatchString(l), "%.80q is not a name of a role", l)("logins")
	}
	want(source.MatchString(u.Source), "%.80q: want a URI or a path, at most 255 characters without blanks", u.Source)("source")
	want(slices.Contains([]kinds.IDForm{kinds.String, kinds.Integer, kinds.UUID}, u.IDs), "%.80q: want string, integer or uuid",
		u.IDs)("id")
	want(u.MaxPayload >= 2 && u.MaxPayload <= MaxPayload, "is %d: want 2 to %d bytes", u.MaxPayload, MaxPayload)("max_payload")
	want(u.Tenants == nil || len(u.Tenants) > 0, "is empty: name tenants, or omit it for all tenants")("tenants")
	want(len(u.Tenants) <= maxTenants, "has %d tenants: want at most %d, or omit it for all tenants", len(u.Tenants), maxTenants)("tenants")
	for _, t := range u.Tenants {
		want(t > 0, "%d is not a tenant", t)("tenants")
	}
	slices.Sort(u.Tenants)
	u.Tenants = slices.Compact(u.Tenants)
	want(len(u.Events) > 0 && len(u.Events) <= maxEvents, "has %d event types: want 1 to %d", len(u.Events), maxEvents)("events")
	for _, of := range slices.Sorted(maps.Keys(u.Events)) {
		e := u.Events[of]
		want(eventName.MatchString(of), "%.80q is not a valid event type: want 1 to 64 letters, digits, _ and -", of)("events", of)
		want(len(e.Versions) > 0, "has no version: want the JSON Schema of version 1")("events", of, "versions")
		e.Checks = make(map[string]json.RawMessage)
		u.Events[of] = e
		for _, v := range slices.Sorted(maps.Keys(e.Versions)) {
			n, err := strconv.Atoi(v)
			want(err == nil && n >= 1 && n <= 32767 && strconv.Itoa(n) == v, "%.80q is not a version: want 1 to 32767", v)("events", of,
				"versions", v)
			check, faults := compile(e.Versions[v], []string{"events", of, "versions", v})
			e.Checks[v], all = check, append(all, faults...)
		}
	}
	return all
}

// Reserved reports whether a kind, or Tidings itself, has events of the aggregate type.
func Reserved(set *kinds.Set, aggregateType string) bool {
	return set.Has(aggregateType) || aggregateType == event.AggregateThread || aggregateType == event.AggregatePerson ||
		event.System(aggregateType)
}

// Fault is a violated rule.
type Fault struct {
	Path []string // of members in the file
	Text string
}

func (f Fault) Error() string { return strings.Join(f.Path, ".") + ": " + f.Text }

// Changes returns what a new version of the upstream changes, one line each, and the changes that
// would give stored events another meaning.
func Changes(was, is *Upstream) (all, refused []string) {
	switch {
	case is.Removed && !was.Removed:
		return []string{"upstream " + is.Name + ": removed"}, nil
	case was.Removed:
		add(&all, "upstream %s: added again", is.Name)
	}
	if was.TypePrefix != is.TypePrefix {
		add(&refused, "type_prefix: is %s and stays so: subscribers know the types by it", was.TypePrefix)
	}
	if was.Source != is.Source {
		add(&refused, "source: is %s and stays so: source and id together identify an event", was.Source)
	}
	if was.IDs != is.IDs {
		if is.IDs == kinds.String {
			add(&all, "id: %s → %s", was.IDs, is.IDs)
		} else {
			add(&refused, "id: %s cannot become %s: stored events have other ids", was.IDs, is.IDs)
		}
	}
	if !slices.Equal(was.Tenants, is.Tenants) {
		add(&all, "tenants: %s → %s", tenants(was), tenants(is))
	}
	if was.MaxPayload != is.MaxPayload {
		add(&all, "max_payload: %d → %d", was.MaxPayload, is.MaxPayload)
	}
	for _, of := range slices.Sorted(maps.Keys(was.Events)) {
		if _, ok := is.Events[of]; !ok {
			add(&refused, "events.%s: stays: stored events have it. Stop writing it instead", of)
		}
	}
	for _, of := range slices.Sorted(maps.Keys(is.Events)) {
		if before, ok := was.Events[of]; ok {
			changesOf(of, before, is.Events[of], &all, &refused)
		} else {
			add(&all, "events.%s: added", of)
		}
	}
	for _, l := range is.Logins {
		if !slices.Contains(was.Logins, l) {
			add(&all, "logins: %s added", l)
		}
	}
	for _, l := range was.Logins {
		if !slices.Contains(is.Logins, l) {
			add(&all, "logins: %s removed", l)
		}
	}
	return all, refused
}

// changesOf adds the changes of one event type.
func changesOf(of string, before, now Event, all, refused *[]string) {
	if before.Summary != now.Summary {
		add(all, "events.%s.summary: changed", of)
	}
	for _, v := range slices.Sorted(maps.Keys(before.Versions)) {
		switch schema, ok := now.Versions[v]; {
		case !ok:
			add(refused, "events.%s.versions.%s: stays: stored events have it", of, v)
		case !equalJSON(before.Versions[v], schema):
			add(refused, "events.%s.versions.%s: its schema stays: stored events have it. Add a version instead", of, v)
		}
	}
	for _, v := range slices.Sorted(maps.Keys(now.Versions)) {
		if _, ok := before.Versions[v]; !ok {
			add(all, "events.%s.versions.%s: added", of, v)
		}
	}
}

func add(list *[]string, format string, args ...any) {
	*list = append(*list, fmt.Sprintf(format, args...))
}

func tenants(u *Upstream) string {
	if u.Tenants == nil {
		return "all"
	}
	return strings.Trim(fmt.Sprint(u.Tenants), "[]")
}

func equalJSON(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}
