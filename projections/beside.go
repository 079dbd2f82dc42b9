package projections

import "cmp"

// Field is one value of an entity: as the truth makes it, and as a projection has it. Both are of one comparable type, or "" where a side has no row.
type Field struct {
	Name      string
	Want, Got any
}

// Compared is a field.
func Compared(name string, want, got any) Field { return Field{Name: name, Want: want, Got: got} }

// Differs reports whether the two are not the same.
func (f Field) Differs() bool { return f.Want != f.Got }

// Beside is an entity of the truth beside what a projection has of it. Where a side has none, its values are empty.
type Beside struct {
	Difference            // without a field
	InTruth, InProjection bool
	Fields                []Field
}

// SideBySide makes a Beside of two rows, of which either may be nil. fields compares two rows.
func SideBySide[T any](about Difference, want, got *T, fields func(want, got *T) []Field) Beside {
	b := Beside{Difference: about, InTruth: want != nil, InProjection: got != nil}
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

// Same reports whether the projection is what the truth makes it.
func (b Beside) Same() bool {
	same := true
	b.Report(func(Difference) { same = false })
	return same
}

// Report reports each field that differs, or the row when a side has none.
func (b Beside) Report(report func(Difference)) {
	if b.InTruth != b.InProjection {
		b.Differ(report, "row", Present(b.InTruth), Present(b.InProjection))
		return
	}
	for _, f := range b.Fields {
		b.Differ(report, f.Name, f.Want, f.Got)
	}
}
