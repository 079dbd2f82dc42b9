package doctor

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/outbox"
)

// TestADoctorFindsMonthsWithoutAnExport checks ranges as coldstore.Store.Due returns them.
func TestADoctorFindsMonthsWithoutAnExport(t *testing.T) {
	now := time.Date(2030, 6, 15, 0, 0, 0, 0, time.UTC)
	due := []outbox.Range{
		{FirstAt: time.Date(2030, 5, 31, 23, 0, 0, 0, time.UTC), ArchivedAt: now.Add(-exportLate - 1)},
		{FirstAt: time.Date(2030, 5, 2, 0, 0, 0, 0, time.UTC), ArchivedAt: now.AddDate(0, 0, -9)},
		{FirstAt: time.Date(2030, 4, 2, 0, 0, 0, 0, time.UTC), ArchivedAt: now.AddDate(0, 0, -30)},
		{FirstAt: now, ArchivedAt: now.Add(-exportLate)},
	}
	for _, c := range []struct {
		name, url string
		exported  bool
		due       []outbox.Range
		want      []string // where, and part of the rest
	}{
		{"the archive was never exported", "", false, due, nil},
		{"everything has an export", "file:///x", true, nil, nil},
		{"a young range has no export yet", "file:///x", true, due[3:], nil},
		{"two months have none", "file:///x", false, due,
			[]string{"archive of 2030-04: 1 range without an export: ", "--month 2030-04",
				"archive of 2030-05: 2 ranges without", "--month 2030-05"}},
		{"exports were turned off", "", true, due[2:], []string{"archive of 2030-04: 1 range without an export, and exports are off",
			"outbox_archive_export_url="}},
	} {
		var said string
		all := exports(c.url, c.exported, c.due, now)
		for _, f := range all {
			said += f.Where + ": " + f.What + " " + f.Repair + "\n"
			if f.Check != "archive-export" || f.Severity != Warning {
				t.Errorf("%s: %+v", c.name, f)
			}
		}
		if slices.ContainsFunc(c.want, func(s string) bool { return !strings.Contains(said, s) }) || len(all) != len(c.want)/2 {
			t.Errorf("%s: %s", c.name, said)
		}
	}
}
