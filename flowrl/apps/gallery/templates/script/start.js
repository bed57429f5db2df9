// All parts are there: they begin to work, and a link's aim is shown.
enhance(document);
follow();
