package bench

import (
	"crypto/md5" //nolint:gosec // bits that SQL computes too, not a secret
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
)

// idForm is the form of the ids of a case's objects.
type idForm string

// The forms: a decimal number, a UUID of version 7 and 26 characters as of a ULID. The last two
// begin with a time, and increase with the number that they are made of.
const (
	integerIDs idForm = "integer"
	uuidIDs    idForm = "uuid"
	textIDs    idForm = "text26"
)

// idsFlag adds the flag --ids.
func idsFlag(cmd *cobra.Command, form *string) {
	cmd.Flags().StringVar(form, "ids", string(integerIDs),
		"the form of ids: integer, uuid (version 7) or text26 (26 characters, as a ULID)")
}

func formOf(name string) (idForm, error) {
	if !slices.Contains([]idForm{integerIDs, uuidIDs, textIDs}, idForm(name)) {
		return "", fmt.Errorf("--ids %s: want integer, uuid or text26", name)
	}
	return idForm(name), nil
}

// of returns the id of a number, always the same.
func (f idForm) of(n int64) event.ID {
	if f == integerIDs {
		return event.IDOf(n)
	}
	sum := md5.Sum([]byte(event.IDOf(n))) //nolint:gosec // see the import
	at, tail := fmt.Sprintf("%012x", 1_700_000_000_000+n), hex.EncodeToString(sum[:])
	if f == uuidIDs {
		return event.ID(at[:8] + "-" + at[8:] + "-7" + tail[:3] + "-8" + tail[3:6] + "-" + tail[6:18])
	}
	return event.ID(strings.ToUpper(at + tail[:14]))
}

// sql returns the same id as a SQL expression of the number.
func (f idForm) sql(number string) string {
	at, tail := `lpad(to_hex(1700000000000 + `+number+`), 12, '0')`, `md5((`+number+`)::text)`
	switch f {
	case uuidIDs:
		return `left(` + at + `, 8) || '-' || right(` + at + `, 4) || '-7' || left(` + tail + `, 3) || '-8' || substr(` + tail +
			`, 4, 3) || '-' || substr(` + tail + `, 7, 12)`
	case textIDs:
		return `upper(` + at + ` || left(` + tail + `, 14))`
	}
	return `(` + number + `)::text`
}
