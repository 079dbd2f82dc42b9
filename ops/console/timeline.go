package console

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
)

// timelineStep is one version of a history: what its writer did.
type timelineStep struct {
	Version  int64
	Verb     string // "edited"
	Level    string // the class of its dot
	By       string
	At       time.Time
	Is       string // the state after it
	Reason   string
	Text     []change // the body's words; nil: it did not change, or the reader did not ask for it
	EventURL string
}

// change is a run of words of two versions.
type change struct {
	Kind string // same, gone or new
	Text string
}

// moderatedVerbs are the verbs of decisions, by the state after them.
var moderatedVerbs = map[string]struct{ verb, level string }{
	event.ModerationApproved: {"approved", "ok"}, event.ModerationHidden: {"hid", "bad"},
	event.ModerationRemoved: {"removed", "bad"}, event.ModerationPending: {"held", "warn"},
}

// childSteps returns the steps of a child from its versions, newest first, of which the last may
// lack the one before it. With bodies it compares texts.
func childSteps(k kinds.Child, tenant int64, all []versioned.Version[event.Child], bodies bool) []timelineStep {
	steps := make([]timelineStep, len(all))
	for i, v := range all {
		is, was := v.Object, event.Child{}
		if i+1 < len(all) {
			was = all[i+1].Object
		}
		s := timelineStep{Version: is.Version, Verb: "edited", Level: "info", By: v.Metadata.CreatedBy, At: v.Metadata.LastUpdateTime,
			Is: strings.ToLower(is.State()), Reason: is.Reason}
		typ := event.Edited
		switch {
		case is.Version == 1:
			s.Verb, typ = "wrote", event.Created
		case is.Erased:
			s.Verb, s.Level, typ = "erased", "bad", event.Erased
		case is.AuthorState != event.AuthorActive:
			s.Verb, s.Level, typ = "deleted", "bad", event.Deleted
		case is.ModerationState != was.ModerationState && was.Version > 0:
			m := moderatedVerbs[is.ModerationState]
			s.Verb, s.Level, typ = cmp.Or(m.verb, "moderated"), cmp.Or(m.level, "info"), event.Moderated
		case is.Body == was.Body && !bytes.Equal(is.Attributes, was.Attributes):
			s.Verb = "changed the attributes"
		}
		older := textBefore(all[i+1:])
		if bodies && (typ == event.Created || typ == event.Edited && older != "" && older != is.Body) {
			s.Text = wordChanges(older, is.Body)
		}
		s.EventURL = address("event", "tenant", tenant, "q", k.Name+"/"+string(is.Parent), "type", typ,
			"since", s.At.UTC().Format(time.RFC3339Nano), "until", s.At.Add(time.Microsecond).UTC().Format(time.RFC3339Nano))
		steps[i] = s
	}
	return steps
}

// textBefore returns the newest body of these versions. A version that is not visible may have
// none.
func textBefore(older []versioned.Version[event.Child]) string {
	for _, v := range older {
		if v.Object.Body != "" {
			return v.Object.Body
		}
	}
	return ""
}

// plainStep returns a step whose verb is its number, for histories without verbs.
func plainStep(m versioned.Metadata, version int64, is string) timelineStep {
	return timelineStep{Version: version, Verb: "wrote version " + strconv.FormatInt(version, 10), Level: "info", By: m.CreatedBy,
		At: m.LastUpdateTime, Is: is}
}

// mostWords bounds the texts that wordChanges compares; of longer ones it returns both.
const mostWords = 1000

// wordChanges returns the difference of two texts by words, from a longest common subsequence. Its
// cost is the product of their numbers of words.
func wordChanges(was, is string) (all []change) {
	a, b := strings.Fields(was), strings.Fields(is)
	add := func(kind string, words ...string) {
		if n := len(all); n > 0 && all[n-1].Kind == kind {
			all[n-1].Text += " " + strings.Join(words, " ")
		} else if len(words) > 0 {
			all = append(all, change{kind, strings.Join(words, " ")})
		}
	}
	if len(a) > mostWords || len(b) > mostWords {
		add("gone", a...)
		add("new", b...)
		return all
	}
	// length[i][j] is that of the longest common subsequence of a[i:] and b[j:]
	length := make([][]int16, len(a)+1)
	for i := range length {
		length[i] = make([]int16, len(b)+1)
	}
	for i := range slices.Backward(a) {
		for j := range slices.Backward(b) {
			if a[i] == b[j] {
				length[i][j] = length[i+1][j+1] + 1
			} else {
				length[i][j] = max(length[i+1][j], length[i][j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) && j < len(b) {
		switch {
		case a[i] == b[j]:
			add("same", a[i])
			i, j = i+1, j+1
		case length[i+1][j] >= length[i][j+1]:
			add("gone", a[i])
			i++
		default:
			add("new", b[j])
			j++
		}
	}
	for ; i < len(a); i++ {
		add("gone", a[i])
	}
	for ; j < len(b); j++ {
		add("new", b[j])
	}
	return all
}
