package event

// Ref identifies an entity at one of its versions: an edge, a child, or the settings of a thread.
// Its JSON is short, because it travels in headers.
type Ref struct {
	Type    string `json:"k"`           // the aggregate type of its events
	From    ID     `json:"a,omitempty"` // for an edge
	To      ID     `json:"b,omitempty"`
	Child   string `json:"c,omitempty"` // the child's id
	Thread  ID     `json:"t,omitempty"` // for settings: the object
	Kind    string `json:"n,omitempty"` // for settings: the kind of the children; absent for comments
	Version int64  `json:"v"`
}

// Ref returns a reference to the pair at its version.
func (f Follow) Ref() Ref {
	return Ref{Type: AggregateFollow, From: f.FollowerID, To: f.FolloweeID, Version: f.Version}
}

// Ref returns a reference to the edge of this kind at its version.
func (e Edge) Ref(kind string) Ref {
	return Ref{Type: kind, From: e.From, To: e.To, Version: e.Version}
}

// Ref returns a reference to the comment at its version.
func (c Comment) Ref() Ref {
	return Ref{Type: AggregateComment, Child: c.CommentID, Version: c.Version}
}

// Ref returns a reference to the child of this kind at its version.
func (c Child) Ref(kind string) Ref { return Ref{Type: kind, Child: c.ID, Version: c.Version} }

// Ref returns a reference to the settings at their version.
func (t Thread) Ref() Ref {
	return Ref{Type: AggregateThread, Thread: t.PostID, Kind: t.Kind, Version: t.Version}
}
