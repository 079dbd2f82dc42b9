package broker

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Config is the environment of every process that connects to NATS.
type Config struct {
	URL         string `env:"NATS_URL, default=nats://127.0.0.1:4222"` // URLs of one or more servers, separated by commas
	Credentials string `env:"NATS_CREDENTIALS"`                        // path of a credentials file; "" for none
	// prefix of the subjects for replies; each login has its own, so that no other login reads them
	InboxPrefix string `env:"NATS_INBOX_PREFIX, default=_INBOX"`
	// path of the PEM certificates that verify the servers; "" for the system's
	TLSCA string `env:"NATS_TLS_CA"`
	// path of the client's PEM certificate, for servers that require one
	TLSCert    string `env:"NATS_TLS_CERT"`
	TLSKey     string `env:"NATS_TLS_KEY"`                        // path of its key
	Stream     string `env:"NATS_STREAM, default=EVENTS"`         // prefix of the streams' names: partition 0 is EVENTS-0
	Prefix     string `env:"NATS_SUBJECT_PREFIX, default=events"` // the relay publishes events to Prefix.PARTITION.>
	LivePrefix string `env:"NATS_LIVE_PREFIX, default=live"`      // the stream republishes stored events to LivePrefix.>
	// relays also publish events to LivePrefix.tTENANT.AGGREGATE.EVENT.OBJECT (event.ObjectSubject)
	LiveObjects bool `env:"NATS_LIVE_OBJECTS, default=false"`
	// ce-source of the events: /tidings, or /tidings/NAME for one installation of several
	Source string `env:"EVENT_SOURCE, default=/tidings"`
	// of each stream, 1 to 5; never lowered on an existing stream
	Replicas int `env:"NATS_REPLICAS, default=1"`
	// server tags: a new stream is placed on servers that have all of them
	Tags   []string      `env:"NATS_PLACEMENT_TAGS"`
	MaxAge time.Duration `env:"NATS_MAX_AGE, default=720h"` // how long events remain in the stream; 0: forever
	// of each stream; a full stream refuses publishes, and the outbox waits; -1 for no limit
	MaxBytes int64 `env:"NATS_MAX_BYTES, default=-1"`
	// false: the streams, the bucket and the durable consumers belong to somebody else, who creates
	// and changes them. Processes only check them
	Unmanaged Unmanaged     `env:"NATS_MANAGE, default=true"`
	Timeout   time.Duration `env:"NATS_TIMEOUT, default=5s"` // for one connection attempt, and for one request about a stream
	// between pings; after two unanswered pings the client tries another server
	Ping time.Duration `env:"NATS_PING_INTERVAL, default=2s"`
}

// Unmanaged is the opposite of NATS_MANAGE, so that the zero Config manages.
type Unmanaged bool

// MarshalText implements encoding.TextMarshaler.
func (u Unmanaged) MarshalText() ([]byte, error) { return strconv.AppendBool(nil, !bool(u)), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *Unmanaged) UnmarshalText(text []byte) error {
	manage, err := strconv.ParseBool(string(text))
	*u = Unmanaged(!manage)
	return err
}

var (
	streamName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,255}$`)
	inbox      = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)
	token      = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	source     = regexp.MustCompile(`^/tidings(/[A-Za-z0-9._-]{1,64})?$`)
	tag        = regexp.MustCompile(`^[^\s,]+$`)
)

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	bad := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(c.URL == "", "NATS_URL is empty")
	bad((c.TLSCert == "") != (c.TLSKey == ""), "NATS_TLS_CERT and NATS_TLS_KEY: want both or none")
	bad(c.InboxPrefix != "" && !inbox.MatchString(c.InboxPrefix),
		"NATS_INBOX_PREFIX is %q: want tokens of letters, digits, - and _ with dots between them", c.InboxPrefix)
	bad(!streamName.MatchString(c.Stream), "NATS_STREAM is %q: want letters, digits, - and _", c.Stream)
	bad(!token.MatchString(c.Prefix), "NATS_SUBJECT_PREFIX is %q: want one token of letters, digits, - and _", c.Prefix)
	bad(!token.MatchString(c.LivePrefix), "NATS_LIVE_PREFIX is %q: want one token of letters, digits, - and _", c.LivePrefix)
	bad(c.Prefix == c.LivePrefix,
		"NATS_SUBJECT_PREFIX and NATS_LIVE_PREFIX are both %q: the stream would republish onto itself", c.Prefix)
	bad(c.Source != "" && !source.MatchString(c.Source),
		"EVENT_SOURCE is %q: want /tidings, or /tidings/ and a name of at most 64 letters, digits, dots, - and _", c.Source)
	bad(c.Replicas < 1 || c.Replicas > 5, "NATS_REPLICAS is %d: want 1 to 5", c.Replicas)
	for _, t := range c.Tags {
		bad(!tag.MatchString(t), "NATS_PLACEMENT_TAGS has %q: want tags without blanks, with commas between them", t)
	}
	bad(c.MaxAge != 0 && c.MaxAge < time.Minute, "NATS_MAX_AGE is %s: want 0 or at least 1m", c.MaxAge)
	bad(c.MaxBytes < -1 || c.MaxBytes == 0, "NATS_MAX_BYTES is %d: want -1 or more than 0", c.MaxBytes)
	bad(c.Ping < 100*time.Millisecond, "NATS_PING_INTERVAL is %s: want at least 100ms", c.Ping)
	bad(c.Timeout <= 0, "NATS_TIMEOUT is %s: want more than 0", c.Timeout)
	return errors.Join(errs...)
}

// Placement places a stream on servers that have all these tags. Without tags it returns nil: any
// server.
func Placement(tags []string) *jetstream.Placement {
	if len(tags) == 0 {
		return nil
	}
	return &jetstream.Placement{Tags: tags}
}

// SameTags compares tags as servers do, regardless of order and case.
func SameTags(a, b []string) bool {
	norm := func(tags []string) []string {
		all := make([]string, len(tags))
		for i, t := range tags {
			all[i] = strings.ToLower(t)
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	return slices.Equal(norm(a), norm(b))
}

func (c Config) servers() string { return strings.ReplaceAll(c.URL, " ", "") }
