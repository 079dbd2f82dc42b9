package bench

import (
	"flag"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden file")

// TestResultsKeepTheirNames compares the JSON names of every result, in their order, with
// testdata/results.golden: scripts read them, and so do the pages of figures. -update writes it.
func TestResultsKeepTheirNames(t *testing.T) {
	const golden = "testdata/results.golden"
	var b strings.Builder
	for _, r := range []struct {
		command string
		result  any
	}{
		{"archive, latency, project, relay, subscribe", result{}}, {"archive --with-writes", besideResult{}},
		{"archive --with-writes, last line", besideSummary{}}, {"neighbors", neighborsResult{}}, {"overload", overloadResult{}},
		{"read", readResult{}}, {"relay --ranges", rangesResult{}}, {"relay --ranges, last line", rangesSummary{}},
		{"relay --rtt, last line", rttSummary{}},
		{"serve", serveResult{}}, {"sizes", sizesResult{}}, {"trace", traceResult{}}, {"trace, last line", traceRatios{}},
		{"write", writeResult{}},
	} {
		b.WriteString(r.command + "\n")
		for _, f := range reflect.VisibleFields(reflect.TypeOf(r.result)) {
			if name := f.Tag.Get("json"); name != "" {
				b.WriteString("  " + name + "\n")
			}
		}
	}
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(b.String(), "\n")); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", golden, diff)
	}
}
