package projections

import "cmp"

// Field is one value of an entity: the value that the truth requires, and the value in a
// projection. Both have the same comparable type, or are "" if a side has no row.
type Field struct {
	Name      string
	Want, Got any
	// The versions of what the values derive from, if that is more than the entity: sums over all
	// of it.
	WantVersion, GotVersion int64
}

// Compared returns a Field.
func Compared(name string, want, got any) Field { return Field{Name: name, Want: want, Got: got} }

// Differs reports whether the two values differ.
func (f Field) Differs() bool { return f.Want != f.Got }

// Diff is an entity with its values in the truth and in a projection. The values of a side without
// a row are empty.
type Diff struct {
	Difference            // without a field
	InTruth, InProjection bool
	Fields                []Field
}

// NewDiff returns the Diff of two rows, either of which may be nil. fields compares two rows.
func NewDiff[T any](about Difference, want, got *T, fields func(want, got *T) []Field) Diff {
	b := Diff{Difference: about, InTruth: want != nil, InProjection: got != nil}
	if want == nil && got == nil {
		return b
	}
	b.Fields = fields(cmp.Or(want, got), cmp.Or(got, want))
	for i := range b.Fields {
		if want == nil {
			b.Fields[i].Want = ""
		}
		if got == nil {
			b.Fields[i].Got = ""
		}
	}
	return b
}

// Same reports whether the projection agrees with the truth. The console's templates call it.
func (b Diff) Same() bool {
	same := true
	b.Report(func(Difference) { same = false })
	return same
}

// Report reports each field that differs, or the whole row if one side has none.
func (b Diff) Report(report func(Difference)) {
	if b.InTruth != b.InProjection {
		b.Differ(report, "row", Present(b.InTruth), Present(b.InProjection))
		return
	}
	for _, f := range b.Fields {
		d := b.Difference
		if f.WantVersion != 0 {
			d.WantVersion, d.GotVersion = f.WantVersion, f.GotVersion
		}
		d.Differ(report, f.Name, f.Want, f.Got)
	}
}
